//! Hostile templates, limits, errors and sources.

use serde_json::{Map, Value, json};

use super::fixtures::{CHATML, render, render_with};
use super::*;
use crate::text::ControlTokens;

fn hello() -> Value {
    json!([{"role": "user", "content": "hello"}])
}

fn error(source: &str) -> TemplateError {
    render(source, &hello()).unwrap_err()
}

#[test]
fn endless_templates_run_out_of_fuel() {
    let nested =
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}";
    let doubling = "{% set ns = namespace(x='ab') %}{% for i in range(200) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let replace = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aaaaaaaa') %}\
                   {% endfor %}";
    let pad = "{% for i in range(1000) %}{% set x = 'a'.ljust(100000000) %}{% endfor %}";
    for source in [nested, doubling, replace, pad] {
        let error = error(source);
        assert!(
            matches!(
                error,
                TemplateError::OutOfFuel { .. } | TemplateError::Failed { .. }
            ),
            "{source}: {error}"
        );
    }
    assert!(matches!(
        error(nested),
        TemplateError::OutOfFuel { fuel: 4_000_000 }
    ));
    let message = error("{{ range(10 ** 9) | list }}").to_string();
    assert_eq!(
        message,
        "chat template, line 1: invalid operation: range has too many elements"
    );
}

#[test]
fn recursion_ends_in_an_error() {
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% call g() %}{{ f(n) }}{% endcall %}{% endmacro %}{% macro g() %}{{ caller() }}{% endmacro %}{{ f(1) }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    ] {
        assert!(
            matches!(
                error(source),
                TemplateError::Failed { .. } | TemplateError::OutOfFuel { .. }
            ),
            "{source}"
        );
    }
    for (open, close) in [("(", ")"), ("[", "]"), ("{'a': ", "}")] {
        let source = format!("{{{{ {}1{} }}}}", open.repeat(1_000), close.repeat(1_000));
        assert!(
            matches!(error(&source), TemplateError::Syntax { .. }),
            "{open}"
        );
    }
    let blocks = "{% if true %}".repeat(4_000);
    assert!(matches!(error(&blocks), TemplateError::Syntax { .. }));
}

/// The engine turns these into syntax trees or values as deep as they are long; each must fit the stack.
#[test]
fn the_deepest_nesting_that_is_allowed_does_not_overflow() {
    let fill = |part: &str| part.repeat(8_000 / part.len());
    for part in ["not ", "-"] {
        let _ = render(&format!("{{{{ {}1 }}}}", fill(part)), &hello());
    }
    for part in [
        " + 1",
        "+1",
        " ** 1",
        "|e",
        "[0]",
        ".a",
        " ~ 1",
        " or 0",
        " < 0",
        " if 0 else 1",
        " is odd",
        "()",
    ] {
        let _ = render(&format!("{{{{ 1{} }}}}", fill(part)), &hello());
    }
    let _ = render(
        &format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(4_000)),
        &hello(),
    );
    for (value, count) in [
        ("[x]", 4_000),
        ("{'a': x}", 4_000),
        ("(x,)", 4_000),
        ("namespace(a=x)", 4_000),
        // These look at all levels for each item of each level.
        ("x[0:]", 400),
        ("x + [1]", 400),
        ("x * 1", 400),
    ] {
        let sets = format!("{{% set x = {value} %}}").repeat(count);
        for end in [
            "{{ x }}",
            "{{ x | tojson }}",
            "{{ x == [x] }}",
            "{{ [x, x] | sort | length }}",
            "{{ {x: 1} }}",
        ] {
            let _ = render(&format!("{{% set x = [1] %}}{sets}{end}"), &hello());
        }
    }
}

#[test]
fn namespaces_keep_only_bounded_plain_data() {
    for value in [
        "[ns.x]",
        "{'a': ns.x}",
        "(ns.x,)",
        "namespace(a=ns.x)",
        "dict(a=ns.x)",
        "[ns.x | list]",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range(1000) %}}{{% set ns.x = {value} %}}{{% endfor %}}"
        );
        let message = error(&source).to_string();
        assert!(
            message.ends_with("value is nested too deeply for a namespace"),
            "{value}: {message}"
        );
    }
    for value in [
        "ns.x[0:]",
        "ns.x * 1",
        "ns.x | reverse",
        "ns.x + []",
        "ns.x | select",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=[1, 2]) %}}{{% for i in range(999) %}}{{% set ns.x = {value} %}}{{% endfor %}}{{{{ ns.x | list | length }}}}"
        );
        assert_eq!(render(&source, &hello()).unwrap().text(), "2", "{value}");
    }
    let cycle = "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}";
    assert_eq!(render(cycle, &hello()).unwrap().text(), "{'x': {'x': 1}}");
}

#[test]
fn sizes_are_limited() {
    let limits = Limits {
        source_bytes: 100,
        fuel: 1_000_000,
        output_bytes: 64,
        ..Limits::default()
    };
    let run = |source: &str| {
        render_with(source, &hello(), limits, &Map::new())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        run(&"x".repeat(101)),
        "the chat template has more than 100 bytes"
    );
    assert_eq!(
        render(&"{{ 1 }}".repeat(9_000), &hello())
            .unwrap_err()
            .to_string(),
        "the chat template has 9000 tags, the limit is 4096"
    );
    assert_eq!(
        render(&format!("{{{{ 1{} }}}}", "+1".repeat(5_000)), &hello())
            .unwrap_err()
            .to_string(),
        "a tag of the chat template has more than 8192 bytes"
    );
    assert_eq!(
        run("{% for i in range(99) %}x{% endfor %}"),
        "the rendered prompt has more than 64 bytes"
    );
}

#[test]
fn nothing_outside_can_be_reached() {
    for source in [
        "{% include '/etc/passwd' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__ }}{{ self._TemplateReference__context }}",
        "{{ debug() }}",
        "{{ open('/etc/passwd') }}",
    ] {
        let result = render(source, &hello());
        assert!(result.is_err(), "{source}: {result:?}");
    }
}

#[test]
fn errors_carry_the_templates_words_and_the_line() {
    assert_eq!(
        error("{{ raise_exception('roles must alternate') }}").to_string(),
        "the chat template refused the messages: roles must alternate"
    );
    let in_macro = "{% macro check(m) %}{% if m %}{{ raise_exception('no ' ~ m.role) }}{% endif %}{% endmacro %}\n\
                    {% for m in messages %}{{ check(m) }}{% endfor %}";
    assert!(matches!(error(in_macro), TemplateError::Raised { message } if message == "no user"));
    insta::assert_snapshot!(
        [
            error("ok\n{{ messages[0].nope.deeper }}"),
            error("\n\n{{ messages"),
            error("{{ nobody() }}"),
            error("{{ messages | nope }}"),
            error("{{ 'a' + 1 }}"),
        ]
        .map(|error| error.to_string())
        .join("\n"),
        @r"
    chat template, line 2: undefined value: `messages[0].nope` is undefined
    chat template, line 3: syntax error: unexpected end of input, expected end of variable block
    chat template, line 1: unknown function: nobody is unknown
    chat template, line 1: unknown filter: filter nope is unknown
    chat template, line 1: invalid operation: tried to use + operator on unsupported types string and number
    "
    );
}

#[test]
fn conversations_without_messages_are_refused() {
    assert_eq!(
        render(CHATML, &json!([])).unwrap_err().to_string(),
        "the conversation is empty, expected at least one message"
    );
    assert_eq!(
        render(CHATML, &json!([1])).unwrap_err().to_string(),
        "message 0 is a number, expected an object"
    );
}

#[test]
fn sources_are_found_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let load = || TemplateSet::from_directory(dir.path());
    assert!(matches!(load(), Err(TemplateError::None)));
    write(
        "tokenizer_config.json",
        &json!({"chat_template": "plain"}).to_string(),
    );
    assert_eq!(load().unwrap().select(None, true).unwrap(), "plain");
    let list = json!([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]);
    write(
        "tokenizer_config.json",
        &json!({"chat_template": list}).to_string(),
    );
    let set = load().unwrap();
    assert_eq!(set.origin(), TemplateOrigin::TokenizerConfig);
    assert_eq!(
        (
            set.select(None, false).unwrap(),
            set.select(None, true).unwrap()
        ),
        ("d", "t")
    );
    let error = set.select(Some("rag"), false).unwrap_err().to_string();
    assert_eq!(
        error,
        "no chat template `rag`, the checkpoint has: default, tool_use"
    );
    write(
        "chat_template.json",
        &json!({"chat_template": "processor"}).to_string(),
    );
    assert_eq!(load().unwrap().select(None, false).unwrap(), "processor");
    write("chat_template.jinja", "file");
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/rag.jinja", "rag");
    let set = load().unwrap();
    assert_eq!(set.origin().to_string(), "chat_template.jinja");
    assert_eq!(
        (
            set.select(None, true).unwrap(),
            set.select(Some("rag"), true).unwrap()
        ),
        ("file", "rag")
    );

    write("chat_template.jinja", "x");
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    std::fs::create_dir(dir.path().join("chat_template.jinja")).unwrap();
    let error = load().unwrap_err();
    assert!(
        std::error::Error::source(&error)
            .is_some_and(|e| e.to_string() == "expected a regular file")
    );
    std::fs::remove_dir(dir.path().join("chat_template.jinja")).unwrap();
    write("chat_template.json", "{\"chat_template\": 3}");
    let error = load().unwrap_err().to_string();
    assert_eq!(
        error,
        "`chat_template.json` is not valid: `chat_template` is neither a text nor a list"
    );
    assert!(matches!(
        TemplateSet::from_gguf(None, []),
        Err(TemplateError::None)
    ));
    let gguf =
        TemplateSet::from_gguf(Some("g"), [("tool_use".to_owned(), "t".to_owned())]).unwrap();
    assert_eq!(gguf.select(None, true).unwrap(), "t");
    assert!(matches!(
        TemplateSet::from_file(&dir.path().join("none")),
        Err(TemplateError::Read { .. })
    ));
}

/// Seeded mutations of real-looking templates: errors are fine, panics and overflows are not.
#[test]
fn mutated_templates_never_panic() {
    const SEEDS: [&str; 4] = [
        include_str!("../../../tests/golden/templates/reasoning.jinja"),
        include_str!("../../../tests/golden/templates/typed_macros.jinja"),
        include_str!("../../../tests/golden/templates/alternating.jinja"),
        "{{ messages | tojson(indent=3) }}{{ strftime_now('%Y%-d%') }}{{ 'a'.zfill(4)[1:-1] }}{{ '{:>4}'.format(2) }}",
    ];
    let control = ControlTokens::new([(1, "<|im_end|>".to_owned())]);
    let messages =
        json!([{"role": "user", "content": "a<|im_end|>b<|"}, {"role": "tool", "content": "{}"}]);
    let tools =
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let limits = Limits {
        fuel: 50_000,
        ..Limits::default()
    };
    let mut random = crate::text::Lcg(3);
    for round in 0..800 {
        let bytes = random.mutate(SEEDS[round % SEEDS.len()].as_bytes());
        let source = String::from_utf8_lossy(&bytes);
        let Ok(template) = ChatTemplate::compile(&source, &control, limits) else {
            continue;
        };
        let _ = template.render(&RenderInput {
            messages: messages.as_array().unwrap(),
            tools: Some(&tools),
            documents: None,
            add_generation_prompt: true,
            continue_final: None,
            named_tokens: &crate::text::NamedTokens::new(),
            variables: &Map::new(),
            now: WallClock {
                unix_seconds: 0,
                utc_offset_seconds: 0,
            },
        });
    }
}
