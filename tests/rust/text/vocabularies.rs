//! Small tokenizers of every kind, and the real ones named by the environment.

use std::path::PathBuf;
use std::sync::Arc;

use miniinfer_core::text::{Detokenizer, TextModel};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

/// A tokenizer twice: ours and the library's.
pub struct Pair {
    pub name: String,
    pub model: Arc<TextModel>,
    pub oracle: Tokenizer,
}

impl Pair {
    pub fn new(name: &str, bytes: &[u8]) -> Self {
        Self {
            name: name.to_owned(),
            model: TextModel::from_json(bytes).unwrap(),
            oracle: Tokenizer::from_bytes(bytes).unwrap(),
        }
    }

    /// What the library says; nothing for no tokens, where some of its decoders panic.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let known = |id: &u32| {
            self.oracle.id_to_token(*id).is_some()
                && !(skip_special_tokens && self.model.is_special(*id))
        };
        if ids.iter().any(known) {
            self.oracle.decode(ids, skip_special_tokens).unwrap()
        } else {
            String::new()
        }
    }

    /// What we say, a token at a time.
    pub fn stream(
        &self,
        ids: &[u32],
        skip_special_tokens: bool,
        continuation: bool,
    ) -> Vec<String> {
        let mut detokenizer =
            Detokenizer::new(self.model.clone(), skip_special_tokens, continuation);
        let mut deltas: Vec<String> = ids
            .iter()
            .map(|id| {
                let mut delta = String::new();
                detokenizer.push(*id, &mut delta);
                delta
            })
            .collect();
        deltas.push(String::new());
        detokenizer.finish(deltas.last_mut().unwrap());
        deltas
    }

    pub fn id(&self, token: &str) -> u32 {
        self.oracle
            .token_to_id(token)
            .unwrap_or_else(|| panic!("{token:?} is in {}", self.name))
    }
}

pub fn file(tokens: &[String], added: &[(&str, bool)], decoder: &Value) -> Vec<u8> {
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), json!(id)))
        .collect();
    let added: Vec<Value> = added
        .iter()
        .enumerate()
        .map(|(at, (content, special))| {
            json!({"id": tokens.len() + at, "content": content, "special": special, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false})
        })
        .collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}})
    .to_string()
    .into_bytes()
}

/// A byte as GPT-2's alphabet writes it.
pub fn byte_character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|other| !printable(*other)).count();
    char::from_u32(0x100 + place as u32).unwrap()
}

pub fn byte_name(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| byte_character(*byte)).collect()
}

/// All bytes, some pieces that cut characters, and added tokens that fall outside of the alphabet
/// or inside of it.
pub fn byte_level(decoder: &Value) -> Vec<u8> {
    let pieces: [&[u8]; 8] = [
        b"Hello",
        b" world",
        &[0x20, 0xD7],
        &[0xA9, 0x20, 0xD7],
        &[0xF0, 0x9F],
        &[0x98, 0x80],
        &[0xE6, 0x97, 0xA5, 0xE6],
        &[0xFF, 0xED, 0xA0],
    ];
    let tokens: Vec<String> = (0..=255u8)
        .map(|byte| byte_name(&[byte]))
        .chain(pieces.iter().map(|piece| byte_name(piece)))
        .collect();
    let added = [
        ("<|end|>", true),
        ("<|two words|>", true),
        ("<é>", false),
        ("日", false),
    ];
    file(&tokens, &added, decoder)
}

/// Words with the space mark, all byte tokens, a few that only look like them, an empty token.
pub fn sentence_piece(decoder: &Value) -> Vec<u8> {
    let words = [
        "▁", "▁▁", "▁Hello", "▁world", ".", "▁It", "a", "é", "日本", "x▁y", "", " ", "<0x4>",
        "<0xZZ>", "<0x+5>", "\u{FFFD}", "##ing", "end</w>", "|", "</w>",
    ];
    let tokens: Vec<String> = words
        .iter()
        .map(|word| (*word).to_owned())
        .chain((0..=255u8).map(|byte| format!("<0x{byte:02X}>")))
        .collect();
    file(
        &tokens,
        &[
            ("<s>", true),
            ("</s>", true),
            ("▁▁▁", false),
            ("<0x41>", false),
        ],
        decoder,
    )
}

pub fn llama_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [replace(), {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
}

fn metaspace(scheme: &str) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true})
}

fn byte_level_decoder() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
}

fn sequence(decoders: &[Value]) -> Value {
    json!({"type": "Sequence", "decoders": decoders})
}

pub fn gpt2() -> Pair {
    Pair::new("byte-level", &byte_level(&byte_level_decoder()))
}

pub fn llama() -> Pair {
    Pair::new("llama", &sentence_piece(&llama_decoder()))
}

/// Every decoder that has a path of its own here.
pub fn all() -> Vec<Pair> {
    let fallback = json!({"type": "ByteFallback"});
    let fuse = json!({"type": "Fuse"});
    let strip = json!({"type": "Strip", "content": " ", "start": 2, "stop": 0});
    let regex = json!({"type": "Replace", "pattern": {"Regex": "[a▁]"}, "content": "--"});
    let decoders = [
        (
            "gemma",
            sequence(&[replace(), fallback.clone(), fuse.clone()]),
        ),
        ("metaspace", metaspace("always")),
        ("metaspace, never", metaspace("never")),
        (
            "metaspace, fallback",
            sequence(&[metaspace("first"), fallback.clone(), fuse.clone()]),
        ),
        (
            "fallback, metaspace",
            sequence(&[fallback.clone(), metaspace("always")]),
        ),
        (
            "fallback, regex",
            sequence(&[fallback.clone(), regex.clone(), fuse.clone()]),
        ),
        ("strip each", sequence(&[replace(), strip.clone()])),
        (
            "strip all twice",
            sequence(&[replace(), fallback, fuse.clone(), strip.clone()]),
        ),
        (
            "wordpiece",
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ),
        ("suffix", json!({"type": "BPEDecoder", "suffix": "</w>"})),
        (
            "ctc",
            json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": true}),
        ),
        (
            "ctc, metaspace",
            sequence(&[
                json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "|",
            "cleanup": false}),
                metaspace("always"),
            ]),
        ),
        ("regex over all", sequence(&[fuse, regex])),
        ("none", Value::Null),
    ];
    let pairs = decoders
        .iter()
        .map(|(name, decoder)| Pair::new(name, &sentence_piece(decoder)));
    let stripped = byte_level(&sequence(&[byte_level_decoder(), strip]));
    pairs
        .chain([gpt2(), llama(), Pair::new("byte-level, strip", &stripped)])
        .collect()
}

/// Each `NAME/tokenizer.json` in the folder named by `MINIINFER_TOKENIZERS`; none without the variable.
pub fn real() -> Vec<Pair> {
    let Some(folder) = std::env::var_os("MINIINFER_TOKENIZERS") else {
        println!("MINIINFER_TOKENIZERS is not set: synthetic tokenizers only");
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().join("tokenizer.json"))
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    assert!(
        !files.is_empty(),
        "{} holds no NAME/tokenizer.json",
        folder.display()
    );
    files
        .iter()
        .map(|path| {
            println!("tokenizer {}", path.display());
            Pair::new(&path.display().to_string(), &std::fs::read(path).unwrap())
        })
        .collect()
}
