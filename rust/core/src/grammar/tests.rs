use std::sync::Arc;
use std::time::Instant;

use super::testing::byte_compiler;
use super::*;

fn spec(source: GrammarSource) -> GrammarSpec {
    GrammarSpec {
        source,
        whitespace: Whitespace::Bounded,
    }
}

#[test]
fn timing() {
    let compiler = byte_compiler();
    let t = Instant::now();
    compiler
        .compile(&spec(GrammarSource::JsonObject))
        .expect("ok");
    eprintln!("vocab+first {:?}", t.elapsed());
    let deep = |n: usize| {
        let mut s = String::from("{\"$defs\":{");
        for i in 0..n {
            s += &format!("\"a{i}\":{{\"$ref\":\"#/$defs/a{}\"}},", i + 1);
        }
        s += &format!("\"a{n}\":{{\"type\":\"null\"}}}},\"$ref\":\"#/$defs/a0\"}}");
        s
    };
    let chain = |n: usize, step: &str| {
        let mut s = String::from("{\"$defs\":{");
        for i in 0..n {
            let r = format!("{{\"$ref\":\"#/$defs/a{}\"}}", i + 1);
            s += &format!("\"a{i}\":{},", step.replace('R', &r));
        }
        s += &format!("\"a{n}\":{{\"type\":\"null\"}}}},\"$ref\":\"#/$defs/a0\"}}");
        s
    };
    let nested = |n: usize| format!("{}{{}}{}", "{\"items\":".repeat(n), "}".repeat(n));
    let allof = |n: usize| {
        let mut s = String::from("{\"allOf\":[");
        for i in 0..n {
            s += &format!(
                "{{\"anyOf\":[{{\"type\":\"string\",\"minLength\":{i}}},{{\"type\":\"number\",\"minimum\":{i}}}]}},"
            );
        }
        s.pop();
        s + "]}"
    };
    let props = |n: usize| {
        let mut s = String::from("{\"type\":\"object\",\"properties\":{");
        for i in 0..n {
            s +=
                &format!("\"p{i}\":{{\"type\":\"string\",\"pattern\":\"^(a|b)*a(a|b){{{i}}}$\"}},");
        }
        s.pop();
        s + "}}"
    };
    let cases = vec![
        (
            "objct",
            GrammarSource::JsonSchema(r#"{"type":"objct"}"#.into()),
        ),
        (
            "nowhere",
            GrammarSource::JsonSchema(r##"{"$ref":"#/$defs/x"}"##.into()),
        ),
        (
            "http",
            GrammarSource::JsonSchema(r##"{"$ref":"http://example.com/x"}"##.into()),
        ),
        (
            "self",
            GrammarSource::JsonSchema(r##"{"$ref":"#"}"##.into()),
        ),
        (
            "selfarr",
            GrammarSource::JsonSchema(r##"{"type":"array","items":{"$ref":"#"}}"##.into()),
        ),
        ("chain 7000", GrammarSource::JsonSchema(deep(7000))),
        (
            "chain allof",
            GrammarSource::JsonSchema(chain(5000, "{\"allOf\":[R,{\"type\":\"string\"}]}")),
        ),
        (
            "chain anyof",
            GrammarSource::JsonSchema(chain(5000, "{\"anyOf\":[R,{\"type\":\"string\"}]}")),
        ),
        (
            "chain oneof",
            GrammarSource::JsonSchema(chain(4000, "{\"oneOf\":[R,{\"type\":\"string\"}]}")),
        ),
        (
            "chain items",
            GrammarSource::JsonSchema(chain(5000, "{\"items\":R}")),
        ),
        (
            "chain prop",
            GrammarSource::JsonSchema(chain(4000, "{\"properties\":{\"a\":R}}")),
        ),
        (
            "chain prop2",
            GrammarSource::JsonSchema(chain(3000, "{\"properties\":{\"a\":R,\"b\":R}}")),
        ),
        (
            "chain allof2",
            GrammarSource::JsonSchema(chain(3000, "{\"allOf\":[R,R]}")),
        ),
        (
            "chain anyof2",
            GrammarSource::JsonSchema(chain(3000, "{\"anyOf\":[R,R]}")),
        ),
        ("nest 100", GrammarSource::JsonSchema(nested(100))),
        ("nest 500", GrammarSource::JsonSchema(nested(500))),
        ("allof 8", GrammarSource::JsonSchema(allof(8))),
        ("allof 14", GrammarSource::JsonSchema(allof(14))),
        ("allof 20", GrammarSource::JsonSchema(allof(20))),
        ("props", GrammarSource::JsonSchema(props(1000))),
        ("(", GrammarSource::Regex("(".into())),
        ("reps", GrammarSource::Regex("(a{1,1000}){1,1000}".into())),
        (
            "reps3",
            GrammarSource::Regex("((a{1,1000}){1,1000}){1,1000}".into()),
        ),
        ("expo", GrammarSource::Regex("(a|b)*a(a|b){400}".into())),
        ("uni", GrammarSource::Regex(r"(\p{L}{1,500}){1,500}".into())),
        (
            "minlen",
            GrammarSource::JsonSchema(r#"{"type":"string","minLength":1000000}"#.into()),
        ),
        (
            "maxlen",
            GrammarSource::JsonSchema(r#"{"type":"string","maxLength":1000000000}"#.into()),
        ),
        (
            "items",
            GrammarSource::JsonSchema(r#"{"type":"array","minItems":100000000}"#.into()),
        ),
        (
            "mult",
            GrammarSource::JsonSchema(r#"{"type":"number","multipleOf":0.0000000001}"#.into()),
        ),
        (
            "mult2",
            GrammarSource::JsonSchema(
                r#"{"allOf":[{"type":"number","multipleOf":65537},{"multipleOf":65539}]}"#.into(),
            ),
        ),
        (
            "patterns",
            GrammarSource::JsonSchema(r#"{"patternProperties":{"^x":{"type":"null"}}}"#.into()),
        ),
        (
            "not",
            GrammarSource::JsonSchema(r#"{"not":{"type":"null"}}"#.into()),
        ),
        ("lark", GrammarSource::Lark("start: a".into())),
        (
            "larkleft",
            GrammarSource::Lark("start: start \"a\" | start start | \"\" | \"b\"".into()),
        ),
        (
            "larknest",
            GrammarSource::Lark(format!(
                "start: {}\"a\"{}",
                "(".repeat(190),
                ")".repeat(190)
            )),
        ),
        (
            "larkbig",
            GrammarSource::Lark(
                (0..6000)
                    .map(|i| format!("r{i}: r{} | \"x\"\n", i + 1))
                    .collect::<String>()
                    + "r6000: \"a\"\nstart: r0",
            ),
        ),
        (
            "larkexp",
            GrammarSource::Lark(
                (0..40)
                    .map(|i| format!("r{i}: r{} r{}\n", i + 1, i + 1))
                    .collect::<String>()
                    + "r40: \"a\" | \"\"\nstart: r0",
            ),
        ),
        (
            "larkTexp",
            GrammarSource::Lark(
                (0..40)
                    .map(|i| format!("R{i}: R{} R{}\n", i + 1, i + 1))
                    .collect::<String>()
                    + "R40: \"a\" | \"\"\nstart: R0",
            ),
        ),
        (
            "larkrec",
            GrammarSource::Lark("start: A\nA: A \"a\"".into()),
        ),
        (
            "choice",
            GrammarSource::Choice((0..20000).map(|i| format!("choice {i}")).collect()),
        ),
        (
            "bigenum",
            GrammarSource::JsonSchema(format!(
                "{{\"enum\":[{}]}}",
                (0..20000)
                    .map(|i| format!("\"v{i}\""))
                    .collect::<Vec<_>>()
                    .join(",")
            )),
        ),
    ];
    for (name, source) in cases {
        let t = Instant::now();
        let r = compiler.compile(&spec(source));
        eprintln!(
            "{name}: {:?} {:?}",
            t.elapsed(),
            r.map(|_| ()).map_err(|e| e.to_string())
        );
    }
}
