"""Answers with tool calls as models write them, one spelling for each of SGLang's tool parsers except
`response_template`, whose format comes from a model's tokenizer."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
"""A function's name, and its arguments: strings and integers."""

FUNCTIONS = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "find_hotel": {"near": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields}}}
    for name, fields in FUNCTIONS.items()
]
MARKER = re.compile(r"]<]minimax\[>\[|</?[^\s<>=\"]+>|<\|\"\|>|\[[A-Z_]+\]")
"""Markers that models have as single tokens."""


def answer(parser: str, text: str, calls: Sequence[Call]) -> str:
    """The answer in which a model of this `parser` writes `text` and calls functions."""
    return FORMATS[parser](text, calls)


def _each(one: Callable[[str, dict[str, Any]], str], begin: str = "", end: str = "", between: str = "") -> Any:
    def write(text: str, calls: Sequence[Call]) -> str:
        return text + begin + between.join(one(*call) for call in calls) + end if calls else text

    return write


def _json(**names: str) -> Callable[[str, dict[str, Any]], str]:
    """An object with these field names."""
    name, arguments = names.get("name", "name"), names.get("arguments", "arguments")
    return lambda function, values: json.dumps({name: function, arguments: values}, ensure_ascii=False)


def _around(before: str, say: Callable[[str, dict[str, Any]], str], after: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda function, values: before + say(function, values) + after


def _fields(pattern: str) -> Callable[[dict[str, Any]], str]:
    """Every argument by a pattern: key, value as text, whether it is a string, and its type."""
    kinds = {str: "string", int: "number"}
    return lambda values: "".join(
        pattern.format(key=key, value=value, string=str(isinstance(value, str)).lower(), kind=kinds[type(value)])
        for key, value in values.items()
    )


def _xml(begin: str, field: str, end: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda function, values: begin.format(name=function) + _fields(field)(values) + end


def _dsml(tag: str, begin: str, space: str = "") -> Any:
    invoke = _xml(
        f'<{tag}{space}invoke name="{{name}}">\n',
        f'<{tag}{space}parameter name="{{key}}" string="{{string}}">{{value}}</{tag}{space}parameter>\n',
        f"</{tag}{space}invoke>\n",
    )
    return _each(invoke, f"\n\n<{tag}{space}{begin}>\n", f"</{tag}{space}{begin}>")


def _pythonic(function: str, values: dict[str, Any]) -> str:
    return f"{function}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in values.items())})"


def _gemma(function: str, values: dict[str, Any]) -> str:
    fields = (
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}" for key, value in values.items()
    )
    return f"<|tool_call>call:{function}{{{','.join(fields)}}}<tool_call|>"


def _kimi_k2(text: str, calls: Sequence[Call]) -> str:
    shown = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(values)}<|tool_call_end|>"
        for index, (name, values) in enumerate(calls)
    )
    return text + ("<|tool_calls_section_begin|>" + "".join(shown) + "<|tool_calls_section_end|>" if calls else "")


def _kimi_k3(text: str, calls: Sequence[Call]) -> str:
    field = _fields('<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>')
    shown = (
        f'<|open|>call tool="{name}" index="{index}"<|sep|>{field(values)}<|close|>call<|sep|>'
        for index, (name, values) in enumerate(calls)
    )
    said = f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"
    return said + ("<|open|>tools<|sep|>" + "".join(shown) + "<|close|>tools<|sep|>" if calls else "")


def _harmony(text: str, calls: Sequence[Call]) -> str:
    shown = (
        f"<|start|>assistant<|channel|>commentary to=functions.{name}"
        f"<|constrain|>json<|message|>{json.dumps(values)}<|call|>"
        for name, values in calls
    )
    return f"<|channel|>final<|message|>{text}<|end|>" + "".join(shown)


def _muse(text: str, calls: Sequence[Call]) -> str:
    field = _fields('<atem:parameter name="{key}">{value}</atem:parameter>\n')
    shown = (
        f'<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{field(values)}'
        "</atem:invoke>\n</atem:function_calls><|eom|>"
        for name, values in calls
    )
    return f"to=user<|message|>{text}<|eom|>" + "".join(shown)


def _inkling(text: str, calls: Sequence[Call]) -> str:
    shown = (
        f"<|message_model|>{name}<|content_invoke_tool_json|>"
        f"{json.dumps({'name': name, 'args': values}, ensure_ascii=False)}<|end_message|>"
        for name, values in calls
    )
    return text + "".join(shown)


def _minimax_m3(function: str, values: dict[str, Any]) -> str:
    ns = "]<]minimax[>["
    fields = "".join(f"{ns}<{key}>{value}{ns}</{key}>" for key, value in values.items())
    return f'{ns}<invoke name="{function}">{fields}{ns}</invoke>'


_GLM = _each(
    _xml("<tool_call>{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", "</tool_call>"), "\n"
)
_CODER = _each(
    _xml("<tool_call>\n<function={name}>\n", "<parameter={key}>\n{value}\n</parameter>\n", "</function>\n</tool_call>"),
    "\n",
    between="\n",
)
_QWEN = _each(_around("<tool_call>\n", _json(), "\n</tool_call>"), "\n", between="\n")
_INVOKE = _xml('<invoke name="{name}">\n', '<parameter name="{key}">{value}</parameter>\n', "</invoke>\n")

FORMATS: dict[str, Callable[[str, Sequence[Call]], str]] = {
    "apertus2509": _each(
        lambda name, values: json.dumps({name: values}), "<|tools_prefix|>[", "]<|tools_suffix|>", ", "
    ),
    "beam": _each(  # after the answer's channel, which a reasoning parser removes
        _xml(
            " to={name}<|channel|>analysis <|constrain|>xml<|message|>",
            '<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>',
            "",
        ),
        end="<|call|>",
        between="<|end|><|start|>assistant",
    ),
    "cohere_command4": _each(
        _json(name="tool_name", arguments="parameters"), "<|START_ACTION|>[", "]<|END_ACTION|>", ", "
    ),
    "deepseekv3": _each(
        lambda name, values: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(values)}\n```<｜tool▁call▁end｜>"
        ),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseekv31": _each(
        lambda name, values: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(values)}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseekv32": _dsml("｜DSML｜", "function_calls"),
    "deepseekv4": _dsml("｜DSML｜", "tool_calls"),
    "deepseekv41": _dsml("｜DSML｜", "calls", " "),
    "dots": _each(_INVOKE, "<dots_function_call>\n", "</dots_function_call>"),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _each(_xml("<tool_call>{name}", "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>", "</tool_call>")),
    "gpt-oss": _harmony,
    "k2_horizon": _each(
        _xml(
            "<ifm|tool_call>{name}\n",
            "<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{value}</ifm|arg_value>\n",
            "</ifm|tool_call>",
        ),
        "\n<ifm|tool_calls>\n",
        "\n</ifm|tool_calls>",
        "\n",
    ),
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "lfm2": _each(_pythonic, "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "ling3": _GLM,
    "llama3": _each(_json(arguments="parameters"), "<|python_tag|>", between="; "),
    "mimo": _each(
        _xml("<tool_call>\n<function={name}>\n", "<parameter={key}>{value}</parameter>\n", "</function>\n</tool_call>"),
        "\n",
        between="\n",
    ),
    "minicpm5": _each(_xml('<function name="{name}">', '<param name="{key}">{value}</param>', "</function>"), "\n"),
    "mistral": _each(_json(), "[TOOL_CALLS] [", "]", ", "),
    "muse": _muse,
    "poolside_v1": _GLM,
    "pythonic": _each(_pythonic, "[", "]", ", "),
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "qwen3_coder": _CODER,
    "spark25": _each(
        _xml("<tool_call>{name}\n", "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>\n", "</tool_call>"), "\n"
    ),
    "step3": _each(
        _xml(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
            '<steptml:parameter name="{key}">{value}</steptml:parameter>\n',
            "</steptml:invoke><｜tool_call_end｜>\n",
        ),
        "<｜tool_calls_begin｜>\n",
        "<｜tool_calls_end｜>",
    ),
    "step3p5": _CODER,
    "minimax-m2": _each(_INVOKE, "\n<minimax:tool_call>\n", "</minimax:tool_call>"),
    "minimax-m3": _each(_minimax_m3, "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    "nanbeige": _CODER,
    "trinity": _QWEN,
    "interns1": _each(_around("<|action_start|> <|plugin|>\n", _json(arguments="parameters"), "<|action_end|>")),
    "hermes": _each(_around("<tool_call>", _json(), "</tool_call>"), between="\n"),
    "hunyuan": _each(
        _xml(
            "<tool_call>{name}<tool_sep>\n",
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            "</tool_call>\n",
        ),
        "<tool_calls>\n",
        "</tool_calls>",
    ),
    "gigachat3": lambda text, calls: text + "".join("<|function_call|>" + _json()(*call) for call in calls[:1]),
    "gigachat35": _dsml("｜GCML｜", "tool_calls"),
    "gemma4": _each(_gemma),
    "inkling": _inkling,
    "iquest_q1": _each(
        _xml(
            "<iquest_tool_call>{name}", "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>", "</iquest_tool_call>"
        )
    ),
}
