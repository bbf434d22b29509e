import httpx


def assert_refused(response: httpx.Response, param: str, *, may_be_busy: bool = False) -> None:
    """A 400 that names the field; may_be_busy: or a 429, as other work runs too."""
    error = response.json()["error"]
    if may_be_busy and response.status_code == 429:
        assert error["code"] == "grammars_busy"
        return
    assert response.status_code == 400, response.text
    assert error["code"] == "invalid_grammar", error
    assert error["param"] == param
    assert "\n" not in error["message"]
