"""The tables of server/README that are made from code: flags, and architectures. `make format` writes them."""

import re
from collections.abc import Iterable
from pathlib import Path

from outrider.server.model.families import RECURRENT, REFUSED, SERVED, TEXTS
from outrider.server.plugin.text_alone import IMAGES
from outrider.server.settings.setting import declared, default_in_words, name_of
from outrider.server.settings.settings import Settings

README = Path(__file__).parents[2] / "server" / "README.md"


def with_tables(document: str) -> str:
    """Return the document with up-to-date tables between their marks."""
    for name, lines in (("flags", flags()), ("architectures", architectures())):
        begins, ends = f"<!-- {name}: written by `make format` -->", f"<!-- /{name} -->"
        before, mark, rest = document.partition(begins)
        assert mark, f"{begins} is missing"
        document = "\n".join([f"{before}{begins}", *lines, f"{ends}{rest.partition(ends)[2]}"])
    return document


def flags() -> list[str]:
    lines = ["| flag | default | what it does |", "|---|---|---|"]
    for each, flag in declared(Settings):
        negated = f", `{name_of(each.name).replace('--', '--no-')}`" if each.default is True else ""
        default = default_in_words(each, flag) or ("no" if each.default is False else "none")
        default = default if flag.unset or each.default is None or isinstance(each.default, bool) else f"`{default}`"
        unnamed = [f"`{choice}`" for choice in flag.choices if f"`{choice}`" not in flag.help + default]
        text = flag.help + (f"; also {', '.join(unnamed)}" if unnamed else "")
        lines.append(f"| `{name_of(each.name)}`{negated} | {default} | {text} |")
    return lines


def architectures() -> list[str]:
    groups = (
        ("", SERVED - RECURRENT - TEXTS),
        ("CPU", RECURRENT),
        ("CPU, images too", IMAGES),
        ("CPU, texts alone", TEXTS - {*IMAGES}),
    )
    rows = [("served", where, short(names)) for where, names in groups]
    rows += [(f"{len(each.names.split())} refused", "" if each.on_gpu else "CPU", each.kind) for each in REFUSED]
    return ["| architectures | on | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def short(names: Iterable[str]) -> str:
    endings = re.compile("ForCausalLM$|ForConditionalGeneration$|LMHeadModel$")
    kept = {endings.sub("", name) for name in names if not name.startswith("Transformers")}
    return ", ".join(sorted(sorted(kept), key=str.lower))


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
