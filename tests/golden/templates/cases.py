"""Inputs of the golden renders: conversations, tools and single expressions."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Das Wetter <heute> & \"morgen\" — 날씨",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "도시 이름"},
                "days": {"type": "integer", "default": 3, "minimum": 0.5},
                "units": {"type": "string", "enum": ["c", "f"]},
                "where": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
            },
            "required": ["city"],
        },
    },
}
PLAIN_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": ["string", "null"]}}}

USER = {"role": "user", "content": "  Hello, who are you?\n"}
SYSTEM = {"role": "system", "content": "Be brief.  "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "ok": True, "n": None, "f": 1e-7}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": '{"sky": "clear"}'}

CONVERSATIONS = {
    "one": {"messages": [USER]},
    "one_without_header": {"messages": [USER], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI am a model."},
            {"role": "user", "content": "한국어로 <b>\"말해\"</b> 봐 😀"},
        ]
    },
    "two_users": {"messages": [USER, {"role": "user", "content": "again"}]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER, PLAIN_TOOL]},
    "tool_round": {"messages": [USER, CALL, RESULT, {"role": "assistant", "content": "Clear sky."}], "tools": [WEATHER]},
    "tool_pending": {"messages": [USER, CALL, RESULT], "tools": [WEATHER]},
    "reasoning": {
        "messages": [USER, {"role": "assistant", "content": "Four.", "reasoning": "2+2"}, {"role": "user", "content": "ok"}],
        "enable_thinking": False,
    },
    "reasoning_last": {"messages": [USER, {"role": "assistant", "content": "Four.", "reasoning_content": "2+2\n"}]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image"}, {"type": "text", "text": "here"}]}
        ]
    },
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "continue": {
        "messages": [USER, {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}

# Expressions of Jinja2 and Python, each a template of its own, rendered with EXPRESSION_VARIABLES.
EXPRESSIONS = r"""
{{ true }} {{ none }} {{ [1, 'a', none, 1.5, "it's"] }} {{ {'a': 1, 'b': [true]} }} {{ (1, 2) }} {{ 1.0 }}
{{ 'x' ~ true ~ none ~ 1.5 ~ [1, 'b'] }}
[{{ missing }}] [{{ missing | length }}] {{ missing is defined }} {{ not missing }} {{ 'a' in missing }}
{{ missing.foo }}
{{ none.foo }}|{{ m.foo }}|{{ m['foo'] }}|{{ m.foo is defined }}
{{ m.foo.bar }}
{{ 'a' 'b' }} {{ "\x41 \u00e9 \' \t." }}
{{ 0 < 1 < 3 }} {{ 1 == true }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ 3 not in [1, 2] }}
{% for c in 'abc' %}{{ c }}-{% endfor %}{% for k in m %}{{ k }},{% endfor %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}
{{ 'abc' is iterable }} {{ 'abc' is sequence }} {{ m is sequence }} {{ m is mapping }} {{ m is iterable }} {{ 5 is sequence }} {{ none is iterable }}
{{ 'abc' is string }} {{ 5 is number }} {{ true is number }} {{ 5 is integer }} {{ 5.0 is float }} {{ true is boolean }} {{ none is none }} {{ m is none }}
{{ clash.items() | list }} {{ clash['items'] }} {{ clash.keys() | list }} {{ clash.get('nope') }} {{ clash.get('nope', 7) }}
{{ none | trim }}|{{ missing | trim }}|{{ 5 | string | length }}|{{ '  a b  ' | trim }}|{{ 'xxaxx' | trim('x') }}
{{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 4 / 2 }} {{ 1 + 2.5 }}
{{ ['a', 'b'] | join(', ') }} {{ [true, none, 1] | join(',') }} {{ items | map('string') | join('|') }}
{{ 'Hello wORLD'.title() }} {{ 'hello'.capitalize() }} {{ 'aB' | upper }} {{ 'aB' | lower }} {{ 'hello world' | title }} {{ 'HELLO wORLD' | capitalize }}
{{ 'a,b,c'.split(',', 1) }} {{ ' a  b '.split() }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'abc'.split('x') }} {{ ''.split(',') }} {{ ''.split() }}
{{ 'abc'[::-1] }} {{ 'abc'[-1] }} {{ 'abcdef'[1:4] }} {{ 'abc'[5:] }}| {{ items[-1] }} {{ items[1:] }} {{ items[::-1] }} {{ items[:-1] | length }} {{ items[::2] }}
{{ 'ab' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }}
{{ 'xabcx'.strip('x') }} {{ '\n a \n'.strip() }}| {{ 'aab'.lstrip('a') }} {{ 'baa'.rstrip('a') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'a-b'.partition('-') }}
{{ 'abc'.startswith('a') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.find('c') }} {{ 'abc'.find('z') }} {{ 'aXbX'.replace('X', '-', 1) }} {{ 'aaa'.count('a') }}
{{ '{} {x}'.format(1, x=2) }} {{ '%s-%d' | format('a', 3) }} {{ '7'.zfill(3) }} {{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '.') }}|{{ 'ab'.center(5) }}|
{{ 'a\nb\r\nc'.splitlines() }} {{ 'abc'.isalpha() }} {{ '12'.isdigit() }} {{ 'aB'.swapcase() }} {{ ' '.isspace() }} {{ 'abc'.index('c') }}
{{ m | tojson }} {{ '<a>&"\u00e9 \\ \n\u0001' | tojson }} {{ [1.0, 1e16, 1e-5, 0.1, -2, 100000000000000000000, true, none] | tojson }}
{{ nested | tojson(indent=2) }} {{ nested | tojson(separators=(',', ':')) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ '한' | tojson(ensure_ascii=true) }} {{ [] | tojson(indent=2) }} {{ {} | tojson }}
{{ missing | tojson }}
{{ range(3) | list }} {{ range(1, 6, 2) | list }} {{ range(0) | list }}
{{ ms | selectattr('role', 'equalto', 'user') | list | length }} {{ ms | rejectattr('role', 'equalto', 'user') | map(attribute='content') | list }} {{ ms | map(attribute='role') | unique | list }} {{ ms | selectattr('tool') | list }}
{{ items | select('odd') | list }} {{ items | reject('equalto', 2) | list }} {{ ms | selectattr('role', 'in', ['user', 'tool']) | list | length }}
{{ 'x' if false }}|{{ 'x' if missing else 'y' }}|{{ '' or 'dflt' }}|{{ none or [] }}|{{ 0 and 5 }}
{% set x %}a{{ 1 }}b{% endset %}{{ x }}{{ x | upper }}{% set y, z = 1, 2 %}{{ y }}{{ z }}
{% set ns = namespace(x=1) %}{% for i in items %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}
{% set x = 1 %}{% for i in items %}{% set x = x + i %}{% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}
{% macro f(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller else '' }}>{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}{% call f(4) %}X{% endcall %}
{% for i in items if i != 2 %}{{ loop.index }}/{{ loop.length }}{{ '*' if loop.last }}{% else %}none{% endfor %}{% for i in [] %}{% else %}none{% endfor %}
{% for i in items %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {{ loop.cycle('a', 'b') }} {{ loop.revindex }} {{ loop.changed(i) }};{% endfor %}
{% for i in items %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% if i == 3 %}{% break %}{% endif %}{% endfor %}
{{ items | first }} {{ items | last }} [{{ [] | first }}] {{ items | sum }} {{ items | max }} {{ items | min }} {{ [3, 1, 2] | sort }} {{ items | reverse | list }} {{ ['b', 'A'] | sort }} {{ ms | sort(attribute='role') | map(attribute='role') | list }}
{{ 'abc' | list }} {{ m | list }} {{ m | items | list }} {{ m | dictsort }} {{ dict(a=1, b='x') }} {{ [1, 2, 3] | batch(2) | list }} {{ 'a' | default('b') }} {{ '' | default('b', true) }} {{ missing | default('d') }}
{{ '3' | int }} {{ 'z' | int }} {{ 'z' | int(7) }} {{ 3.7 | int }} {{ '3.9' | int }} {{ '0x1f' | int(base=16) }} {{ '2.5' | float }} {{ 'q' | float }} {{ 3.7 | round }} {{ 3.75 | round(1) }} {{ -3 | abs }}
{{ 'x\ny' | indent }}|{{ 'x\ny' | indent(2, true) }}|{{ 'a b c' | wordcount }}|{{ 'ab' | replace('a', 'z') }}|{{ '<b>' | e }}|{{ '<b>' | safe }}|{{ '<b>' }}
{{ ms | groupby('role') | map('first') | list }} {{ 'abc' | reverse }} {{ [[1, 2], [3]] | map('length') | list }} {{ ['a'] | map('upper') | list }} {{ 'hello world foo' | truncate(11) }}
{%- if m.content is string and m.content -%}  yes  {%- endif %} {{- ' a' -}} {#- note -#} b
{% raw %}{{ not }} {% rendered %}{% endraw %} {{ '{{' }}
{{ strftime_now('%Y-%m-%d %H:%M') }} {{ strftime_now('%-d %B %Y, %A') }}
{{ raise_exception('no: ' ~ m.role) }}
{% generation %}{% set inner = 1 %}{{ m.role }}{% endgeneration %}{{ inner is defined }}
{{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1} }} {{ m == ms[0] }} {{ 'user' in m.values() }} {{ 'role' in m }} {{ [1, [2]] | string }}
{{ 'é' | length }} {{ '😀' | length }} {{ '한글'[0] }} {{ '한글' | upper }} {{ 'ß'.upper() }}
{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }} {% filter upper %}abc{% endfilter %} {{ namespace(a=1).a }}
{{ (items | length) > 2 and items[0] == 1 }} {{ not items }} {{ [] | length == 0 }} {{ items is not string }} {{ 3 is divisibleby 3 }} {{ 3 is odd }} {{ 'a' is in ['a'] }}
{{ 10 | string ~ 'px' }} {{ 1 if 1 else 2 if 2 else 3 }} {{ -items[0] }} {{ 1e3 }} {{ 1_000 }} {{ 2 > 1 > 0 }}
{{ +3 }}
{{ '%s-%d' % ('a', 3) }}
{{ 'hello big world' | truncate(9, leeway=0) }} {{ 'hello big world' | truncate(9, true, '~', 0) }} {{ 'abc' | truncate(2, leeway=0) }}
{{ undefined_function('x') }}
{{ items.append(4) }}
{{ m.update({'a': 1}) }}
{{ ''.__class__ }}|{{ m.__class__ }}
{{ ''.__class__.__mro__ }}
{{ items | unknown_filter }}
{{ 'a' + 1 }}
{% include 'other' %}
{{ m.role
{% if m %}
""".strip("\n").split("\n")

EXPRESSION_VARIABLES = {
    "m": {"role": "user", "content": "héllo"},
    "ms": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    "items": [1, 2, 3],
    "clash": {"items": 3, "keys": 4, "get": 5},
    "nested": {"a": [1, {"b": "c"}], "d": {}, "e": [], "f": "한"},
}
