"""What tokenizers are trained on and asked: texts that tokenizers disagree about, and conversations."""

TRAINING = [
    "the quick brown fox jumps over the lazy dog and then the dog jumps over the fox",
    "hello world, this is a test of the tokenizer; it's what we'll use and they'd agree",
    "def main():\n    print('hello')\n    return 0\n\nfor i in range(10):\n\tx += 1\n",
    "In 2024 there were 365 days and 12 months, 1000 of them 3.14159",
    "naïve café coûte 5€ über größe Straße niño señor",
    "привет мир это проверка", "你好世界 这是一个测试 今天天气很好", "こんにちは世界 テスト です", "안녕하세요 세계 테스트",
    "नमस्ते दुनिया", "مرحبا بالعالم", "   indented    text     with      runs",
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", "camelCase PascalCase snake_case SCREAMING_CASE",
    "The answer is the answer. And then the end of the world.",
] * 3

TEXTS = [
    "",
    " ",
    "hello world",
    " hello world",
    "  hello  world  ",
    "Hello, World! It's what they'd've wanted: WE'LL SEE",
    "line one\nline two\n\n\nline five\r\nline six\r\n",
    "\ttabs\t\tand spaces   \t mixed\n   \n",
    "x = 1234567890 + 3.14159e-10  # 1,000,000",
    "١٢٣ ४५६ ²³ ½ Ⅷ",
    "caf\u00e9 cafe\u0301 \u1e9b\u0323 \ufb01 \u212b",
    "你好，世界。今天天气很好！",
    "こんにちは世界 カタカナ ひらがな ﾊﾝｶｸ",
    "안녕하세요 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "नमस्ते दुनिया क्षत्रिय",
    "مرحبا بالعالم \u200fRTL\u200e שלום",
    "ไทยไม่มีช่องว่าง",
    "🙂 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️",
    "a\u0000b\u0001c\u007f\u0085\u00a0\u2028\u2029\ufeff\ufffd",
    "zero\u200bwidth\u00adsoft\u2060join",
    "<|im_start|>user\nhello<|im_end|>",
    "<s>[INST] x [/INST]</s>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>",
    "almost <|im_start |> <| im_end|> <|im_start|",
    "https://example.org/a/b?c=d&e=%20#f user@example.org",
    "camelCasePascalCase snake_case SCREAMING_CASE kebab-case XMLHttpRequest",
    "if (a<b && c>=d) { return \"x\\n\"; } // done",
    "\u2581leading \u2581 inside",
    "e\u0301\u0301\u0301 stacked z\u0351\u036b\u0343",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0001f9ff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "a" + " " * 37 + "b" + "\n" * 9 + "c",
    "'s 't 're 've 'm 'll 'd 'S 'T",
    "ǅ ŉ İ ı ſ ß ẞ",
]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & \"then\" 날씨",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "  What is 2+2?\n"}
SYSTEM = {"role": "system", "content": "Be brief.  "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"sky": "clear"}'}

CONVERSATIONS = {
    "one": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {
        "messages": [
            USER,
            {"role": "assistant", "content": "<think>\nadd\n</think>\n\nFour."},
            {"role": "user", "content": "한국어로 🙂"},
        ]
    },
    "two_users": {"messages": [USER, {"role": "user", "content": "again"}]},
    "system_late": {"messages": [USER, {"role": "assistant", "content": "Four."}, SYSTEM, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER]},
    "tool_round": {
        "messages": [USER, CALL, RESULT, {"role": "assistant", "content": "Clear."}, {"role": "user", "content": "ok"}],
        "tools": [WEATHER],
    },
    "reasoning": {
        "messages": [
            USER,
            {"role": "assistant", "content": "Four.", "reasoning_content": "2+2"},
            {"role": "user", "content": "sure?"},
        ]
    },
    "no_thinking": {"messages": [USER], "enable_thinking": False},
    "complete": {"messages": [USER, {"role": "assistant", "content": "Four."}], "add_generation_prompt": False},
}
