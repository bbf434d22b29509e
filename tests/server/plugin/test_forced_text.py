"""Text that a grammar forces, in the tokens and the white space of the answer."""

import json
from typing import Any

import pytest
import xgrammar
from answering import tokenizer

from outrider.server.plugin.grammars.forced import ForcedText
from outrider.server.plugin.grammars.json_style import JsonStyle
from outrider.server.plugin.grammars.spelling import MOST_KNOWN, Spelling, Written

RECORDS = [
    {"name": "Anna Berg", "age": 34, "address": {"city": "Oslo", "street_number": 7}, "status": "active"},
    {"name": "Paul", "age": 41, "address": {"city": "Graz", "street_number": 12}, "status": "suspended"},
    {"name": "Mia Lund", "age": 29, "address": {"city": "Bern", "street_number": 3}, "status": "active"},
]
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "address": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "street_number": {"type": "integer"}},
                "required": ["city", "street_number"],
                "additionalProperties": False,
            },
            "status": {"enum": ["active", "suspended"]},
        },
        "required": ["name", "age", "address", "status"],
        "additionalProperties": False,
    },
}
STYLES: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":")}, "one line": {}, "two spaces": {"indent": 2}, "four spaces": {"indent": 4},
    "tabs": {"indent": "\t"},
}  # fmt: skip
LONGEST = 15


@pytest.fixture(scope="module")
def info() -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer())


@pytest.fixture(scope="module")
def spelling(info: xgrammar.TokenizerInfo) -> Spelling:
    return Spelling.of(tokenizer(), info)


def matcher_of(info: xgrammar.TokenizerInfo, schema: dict[str, Any]) -> Any:
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    return xgrammar.GrammarMatcher(compiled, max_rollback_tokens=50)


def written_by(matcher: Any, text: str) -> list[int]:
    """The tokenizer's tokens of a text, which the matcher accepts."""
    tokens: list[int] = tokenizer().encode(text, add_special_tokens=False)
    for token in tokens:
        assert matcher.accept_token(token)
    return tokens


def steps(forced: ForcedText, matcher: Any, answer: list[int]) -> tuple[int, int]:
    """Steps with drafts of forced text that complete the answer, and the number of wrong drafted tokens."""
    place = count = wrong = 0
    while place < len(answer):
        draft = forced.tokens(matcher, answer[:place], LONGEST).tokens
        kept = next((k for k, token in enumerate(draft) if answer[place + k : place + k + 1] != [token]), len(draft))
        for token in answer[place : place + kept + 1]:
            assert matcher.accept_token(token)
        place, count, wrong = place + kept + 1, count + 1, wrong + (kept < len(draft))
    return count, wrong


@pytest.mark.parametrize("style", STYLES)
def test_an_answers_style_is_followed(style: str, info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    """Only the model knows the tokens of values; one step can add the text up to the next value."""
    answer = tokenizer().encode(json.dumps(RECORDS, **STYLES[style]), add_special_tokens=False)
    count, wrong = steps(ForcedText(spelling, JsonStyle()), matcher_of(info, SCHEMA), answer)
    values = [value for record in RECORDS for value in (record["name"], record["age"], *record["address"].values())]  # type: ignore[attr-defined]
    unknown = sum(len(tokenizer().encode(str(value), add_special_tokens=False)) for value in values)
    # Besides the values: the end of each, the choice of each status, and the style of the first record.
    assert count <= unknown + len(values) + 3 + 12
    assert wrong <= 12
    assert len(answer) > 2.4 * count


def test_tool_calls_have_a_style_within_other_text(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    """Quotation marks and braces of the other text do not count."""
    content = {"type": "json_schema", "json_schema": SCHEMA["items"]}
    tags = [{"begin": "<call>", "content": content, "end": "</call>"}]
    grammar = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": tags}}
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(json.dumps(grammar))
    calls = [f"<call>{json.dumps(record, indent=2)}</call>" for record in RECORDS]
    answer = tokenizer().encode('The 6" one }: ' + ' and 7":\n'.join(calls), add_special_tokens=False)
    count, wrong = {}, {}
    for name, style in {"none": None, "tagged": JsonStyle(tagged=True), "not tagged": JsonStyle()}.items():
        matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=50)
        count[name], wrong[name] = steps(ForcedText(spelling, style), matcher, answer)
    assert count["tagged"] < 0.8 * count["not tagged"]
    assert count["tagged"] < 0.8 * count["none"]
    assert wrong["tagged"] <= 12


def test_the_matcher_stays_as_it_is(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    forced, matcher = ForcedText(spelling, JsonStyle()), matcher_of(info, SCHEMA)
    answer = tokenizer().encode('[{"name": "An', add_special_tokens=False)
    masks = [xgrammar.allocate_token_bitmask(1, info.vocab_size) for _ in range(2)]
    for place, token in enumerate(answer):
        matcher.fill_next_token_bitmask(masks[0])
        forced.tokens(matcher, answer[:place], LONGEST)
        forced.after(matcher, answer[:place], answer[place:], LONGEST)
        matcher.fill_next_token_bitmask(masks[1])
        assert bool((masks[0] == masks[1]).all())
        assert matcher.accept_token(token)


def test_a_draft_is_cut_where_it_is_refused_and_continued(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    encode = tokenizer().encode
    forced, matcher = ForcedText(spelling, JsonStyle()), matcher_of(info, SCHEMA)
    answer = written_by(matcher, '[{"name":')
    forced.tokens(matcher, answer, LONGEST)
    draft = encode(' "Eva",', add_special_tokens=False)
    allowed, more = forced.after(matcher, answer, draft, LONGEST)
    assert allowed == len(draft)
    assert tokenizer().decode(more.tokens).strip().startswith('"age":')
    refused = [*draft, *encode(' "size"', add_special_tokens=False)]
    allowed, more = forced.after(matcher, answer, refused, LONGEST)
    assert tokenizer().decode(refused[:allowed]) in (' "Eva",', ' "Eva", "')
    assert tokenizer().decode([*refused[:allowed], *more.tokens]).startswith(' "Eva", "age":')


def split(text: str) -> list[int]:
    """Each letter is a token of its own."""
    return [token for letter in text for token in tokenizer().encode(letter, add_special_tokens=False)]


def test_text_is_drafted_as_the_target_wrote_it(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    """A target that splits names otherwise than the tokenizer does so again, also in the next answer by the grammar."""
    answer = split(json.dumps(RECORDS, indent=2))
    forced, letters = ForcedText(spelling, JsonStyle()), len("street_number")
    first, wrong = steps(forced, matcher_of(info, SCHEMA), answer)
    assert first > 2 * letters
    again, wrong_again = steps(forced.anew(), matcher_of(info, SCHEMA), answer)
    assert again < first - 2 * letters
    assert wrong_again < wrong / 2
    other, _ = steps(ForcedText(spelling, JsonStyle()), matcher_of(info, SCHEMA), answer)
    assert other == first


def test_a_draft_is_cut_where_the_target_wrote_other_tokens(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    encode = tokenizer().encode
    forced, matcher = ForcedText(spelling, JsonStyle()), matcher_of(info, SCHEMA)
    answer = written_by(matcher, '[{"name": "A", "')
    drafted = encode("age", add_special_tokens=False)
    assert forced.after(matcher, answer, drafted, LONGEST)[0] == len(drafted) == 1
    for token in split("age"):
        forced.tokens(matcher, answer, LONGEST)
        assert matcher.accept_token(token)
        answer.append(token)
    forced.tokens(matcher, answer, LONGEST)
    later = matcher_of(info, SCHEMA)
    begun = written_by(later, '[{"name": "B')
    forced = forced.anew()
    forced.tokens(later, begun, LONGEST)
    draft = encode('", "', add_special_tokens=False)
    allowed, more = forced.after(later, begun, [*draft, *drafted], LONGEST)
    assert allowed == len(draft)
    assert more.tokens[:3] == split("age")


def test_a_draft_may_end_the_answer(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    forced, matcher = ForcedText(spelling, JsonStyle()), matcher_of(info, {"const": 7})
    (end,) = info.stop_token_ids[:1]
    draft = [*tokenizer().encode("7", add_special_tokens=False), end, end]
    forced.tokens(matcher, [], LONGEST)
    assert forced.after(matcher, [], draft, LONGEST) == (2, ([], []))


@pytest.mark.parametrize("text", ["é", "naïve €"])
def test_tokens_that_end_within_a_character_are_remembered(text: str, spelling: Spelling) -> None:
    bytes_alone = [list(spelling.vocabulary).index(bytes([byte])) for byte in text.encode()]
    written = Written(spelling)
    written.learn(text.encode(), bytes_alone)
    assert written.spell([], text, LONGEST) == (bytes_alone, [True] * len(bytes_alone))
    partly = Written(spelling)
    partly.learn(text.encode(), bytes_alone[: len(bytes_alone) - 1])
    assert partly.spell([], text, LONGEST)[0] == bytes_alone[: len(bytes_alone) - 1]


def test_a_tokenizer_that_writes_nothing_ends_the_draft() -> None:
    assert Written(Spelling(lambda text: [], [b"a"])).spell([], "a", LONGEST) == ([], [])


def test_few_texts_are_remembered(spelling: Spelling) -> None:
    written = Written(spelling)
    for number in range(3 * MOST_KNOWN):
        written.learn(b"%d" % number, split(str(number)))
        assert len(written._tokens) <= MOST_KNOWN


def test_the_chance_of_a_guess_falls_when_guesses_are_wrong(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    forced, matcher = ForcedText(spelling, JsonStyle()), matcher_of(info, SCHEMA)
    before = forced.tokens(matcher, [], LONGEST).chances
    answer: list[int] = []
    for char in '[\n\n{\t"name"  :\n"x" ,"age":\t3 \n,  "address"':
        (token,) = tokenizer().encode(char, add_special_tokens=False)
        forced.tokens(matcher, answer, LONGEST)
        assert matcher.accept_token(token)
        answer.append(token)
    after = forced.tokens(matcher, answer, LONGEST).chances
    assert min(after) < min(before) - 0.1


@pytest.mark.parametrize(("regex", "begun", "rest"), [("(yes|no), Sir", "y", "es, Sir"), ("[a-z]+", "abc", "")])
def test_other_grammars_force_what_they_leave_no_choice_of(
    regex: str, begun: str, rest: str, info: xgrammar.TokenizerInfo, spelling: Spelling
) -> None:
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_regex(regex), max_rollback_tokens=50)
    answer = written_by(matcher, begun)
    draft = ForcedText(spelling).tokens(matcher, answer, LONGEST).tokens
    assert tokenizer().decode(draft) == rest


def test_forced_parts_of_a_character_are_no_text(info: xgrammar.TokenizerInfo, spelling: Spelling) -> None:
    """Both alternatives begin with the same byte."""
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_regex("a(éx|èy)"), max_rollback_tokens=50)
    forced, answer = ForcedText(spelling), list[int]()
    assert tokenizer().decode(forced.tokens(matcher, answer, LONGEST).tokens) in ("a", "")
    for byte in (b"a", *(bytes([value]) for value in "é".encode())):
        answer.append(list(spelling.vocabulary).index(byte))
        assert matcher.accept_token(answer[-1])
        draft = forced.tokens(matcher, answer, LONGEST).tokens
    assert tokenizer().decode(draft) == "x"


def test_strings_are_not_read_as_json() -> None:
    style = JsonStyle()
    style.read('{\n  "a": "x{ \\" [\\\\",\n  "b": [')
    assert style.guess('"') == "\n    "
    style.read('\n    "c: {')
    assert style.in_string
    style.read('"')
    assert not style.in_string
    assert style.guess("]") == "\n  "
