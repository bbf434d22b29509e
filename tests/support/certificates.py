import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, *, password: str = "", signed_by: str | None = None) -> tuple[str, str]:
    """Certificate and key for localhost, self-signed without `signed_by`."""
    folder.mkdir(exist_ok=True)
    files = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-passout", f"pass:{password}"] if password else ["-nodes"]
    if signed_by is not None:
        command += ["-CA", str(folder / f"{signed_by}.crt"), "-CAkey", str(folder / f"{signed_by}.key")]
    command += ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    return str(files[0]), str(files[1])
