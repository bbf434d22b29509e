"""A machine without a working compiler serves with plain torch, and logs it once."""

import pytest

from outrider.kernels.cpu import build, native


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C++ compiler"), ("false", "failed")], ids=["missing", "broken"]
)
def test_without_a_compiler_plain_torch_is_used(empty_cache, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("OUTRIDER_CPU_KERNELS", raising=False)
    with pytest.raises(build.BuildError, match=reason.replace("+", r"\+")):
        build.library()
    assert native.available.__wrapped__() is False
    (record,) = (r for r in caplog.records if r.name == native.__name__)
    assert "plain torch is used" in record.getMessage()
    assert reason in record.getMessage()


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "outrider").write_text("in the way")
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"cannot write|no C\+\+ compiler|x86-64"):
        build.library()


def test_kernels_that_came_with_the_installation_need_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "built")
    monkeypatch.setattr(build, "_build", lambda compiler, flags, target: target.write_bytes(b"kernels"))
    installed = build.install()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OUTRIDER_CACHE", "/proc/cannot/be/written")
    assert build.library() == installed
    with pytest.raises(build.BuildError):  # built with other flags
        build.library(("-g",))


def test_switched_off(monkeypatch):
    monkeypatch.setenv("OUTRIDER_CPU_KERNELS", "0")
    assert native.available.__wrapped__() is False


def test_the_key_follows_the_sources(monkeypatch, tmp_path):
    before = build._key("g++", ())
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build._key("g++", ()) == before
    (tmp_path / "simd.h").write_text("changed")
    assert build._key("g++", ()) != before
    assert build._key("g++", ("-g",)) != before
