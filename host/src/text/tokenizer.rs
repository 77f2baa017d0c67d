//! The tokenizer of one checkpoint.
//!
//! A thin owner of the `tokenizers` object: what it adds is the set of control tokens, the ids that frame a text, and
//! the reading of the decoder that streaming needs. Encoding is in `encode.rs`, loading in `directory.rs` and `gguf/`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::control::ControlTokens;
use super::detok::{Detokenizer, DetokenizerOptions, StreamStart};
use super::guard::guarded;
use super::piece::PieceStyle;
use super::{TextError, piece};

/// Whether the ids that the model saw around every text in training (BOS, sometimes EOS or `[SEP]`) are put around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// The text alone.
    Bare,
    /// As the tokenizer was set up; an id that the text already begins or ends with is not repeated.
    AsTrained,
}

/// Whether a chat prompt gets a BOS that its template did not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BosRule {
    /// The template decides, as in `transformers`.
    #[default]
    FromTemplate,
    /// Put the tokenizer's BOS in front unless the template wrote one, as llama.cpp does.
    IfMissing,
}

/// The special tokens that have a name, such as `bos_token`, with their spelling. Templates see these as variables.
pub type NamedTokens = BTreeMap<String, String>;

/// A tokenizer. Cloning is cheap and all clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) library: tokenizers::Tokenizer,
    pub(super) control: ControlTokens,
    pub(super) style: PieceStyle,
    /// Ids in front of and behind every text.
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
    /// Whether the start of a text is encoded unlike its middle (SentencePiece's first blank).
    pub(super) start_sensitive: bool,
    pub(super) unknown_id: Option<u32>,
    named: NamedTokens,
    named_ids: BTreeMap<String, u32>,
    vocab_size: usize,
}

/// What a loader knows about the framing of texts. `None` leaves it to the tokenizer's own post-processor.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Framing {
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: Option<bool>,
}

impl Tokenizer {
    /// Finishes a loaded library object. `named` maps `bos_token` and its like to spellings that are in the vocabulary.
    pub(super) fn assemble(
        mut library: tokenizers::Tokenizer,
        named: NamedTokens,
        framing: Framing,
    ) -> Result<Self, TextError> {
        // A checkpoint may ask for cut or padded texts; a prompt is never cut here.
        guarded("switch off truncation", || {
            library.with_padding(None).with_truncation(None)?;
            Ok(())
        })?;
        let (special, ordinary): (Vec<_>, Vec<_>) = library
            .get_added_tokens_decoder()
            .into_iter()
            .partition(|(_, token)| token.special);
        let spelled = |(id, token): (u32, tokenizers::AddedToken)| (id, token.content);
        let control = ControlTokens::new(special.into_iter().map(spelled))
            .with_ordinary(ordinary.into_iter().map(spelled));
        let decoder = serde_json::to_value(library.get_decoder())
            .map_err(|error| TextError::invalid("decoder", error.to_string()))?;
        let named_ids: BTreeMap<String, u32> = named
            .iter()
            .filter_map(|(name, text)| library.token_to_id(text).map(|id| (name.clone(), id)))
            .collect();
        let (mut prefix, mut suffix) = frame(&library)?;
        apply(&mut prefix, framing.add_bos, named_ids.get("bos_token"));
        apply(&mut suffix, framing.add_eos, named_ids.get("eos_token"));
        let start_sensitive = is_start_sensitive(&library)?;
        let vocab_size = library.get_vocab_size(true);
        let inner = Inner {
            style: PieceStyle::recognise(&decoder),
            unknown_id: named_ids.get("unk_token").copied(),
            library,
            control,
            prefix,
            suffix,
            start_sensitive,
            named,
            named_ids,
            vocab_size,
        };
        Ok(Tokenizer {
            inner: Arc::new(inner),
        })
    }

    /// Control tokens: the ids that ordinary text never produces.
    pub fn control(&self) -> &ControlTokens {
        &self.inner.control
    }

    /// Number of ids, added tokens included. The model's output may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The id of a token by its exact text in the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.library.token_to_id(token)
    }

    /// The token of `id` as the vocabulary writes it (`Ġthe`, `▁the`), or `None` outside the vocabulary.
    pub fn piece(&self, id: u32) -> Option<String> {
        self.inner.library.id_to_token(id)
    }

    /// The bytes that `id` stands for in the middle of a text: what an API reports for a single token. May be part of
    /// a character. Empty outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.piece(id) else {
            return Vec::new();
        };
        match self.piece_style() {
            PieceStyle::ByteLevel => piece::byte_level_bytes(&token),
            PieceStyle::Sentence {
                space,
                byte_fallback,
                ..
            } => match piece::byte_piece(&token) {
                Some(byte) if *byte_fallback => vec![byte],
                _ => token.replace(*space, " ").into_bytes(),
            },
            PieceStyle::Metaspace { space, .. } => token.replace(*space, " ").into_bytes(),
            PieceStyle::WordPiece { .. } | PieceStyle::Joined | PieceStyle::Window => {
                token.into_bytes()
            }
        }
    }

    /// The id of a named token, for example `bos_token`.
    pub fn named_id(&self, name: &str) -> Option<u32> {
        self.inner.named_ids.get(name).copied()
    }

    /// The named tokens with their spelling, for templates and `inspect`.
    pub fn named(&self) -> &NamedTokens {
        &self.inner.named
    }

    /// The BOS id, whether or not it is put in front of texts.
    pub fn bos_id(&self) -> Option<u32> {
        self.named_id("bos_token")
    }

    /// A stream from ids to text.
    pub fn detokenizer(&self, options: DetokenizerOptions) -> Detokenizer {
        Detokenizer::new(self, options)
    }

    /// The text of a finished list of ids.
    pub fn decode(&self, ids: &[u32], options: DetokenizerOptions) -> String {
        let mut stream = self.detokenizer(options);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id));
        }
        text.push_str(&stream.finish());
        text
    }

    /// The text of ids in full, control tokens spelled out: for logs and `inspect`.
    pub fn decode_verbatim(&self, ids: &[u32]) -> String {
        self.decode(
            ids,
            DetokenizerOptions {
                skip_control: false,
                start: StreamStart::Continuation,
            },
        )
    }

    pub(super) fn piece_style(&self) -> &PieceStyle {
        &self.inner.style
    }

    /// The library's own decoder, for shapes that cannot be split by token. A failure there gives no text.
    pub(super) fn library_decode(&self, ids: &[u32]) -> String {
        guarded("decode", || self.inner.library.decode(ids, false)).unwrap_or_default()
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.inner.vocab_size)
            .field("style", &self.inner.style)
            .field("control", &self.inner.control.len())
            .field("prefix", &self.inner.prefix)
            .field("suffix", &self.inner.suffix)
            .finish_non_exhaustive()
    }
}

/// What the post-processor puts around a text.
fn frame(library: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    let (bare, framed) = guarded("encode", || {
        let bare = library.encode_fast("a", false)?.get_ids().to_vec();
        let framed = library.encode_fast("a", true)?.get_ids().to_vec();
        Ok((bare, framed))
    })?;
    if bare.is_empty() {
        // A vocabulary that cannot even write "a": all that comes is frame, and it can only be in front.
        return Ok((framed, Vec::new()));
    }
    let at = framed
        .windows(bare.len())
        .position(|window| window == bare)
        .unwrap_or(0);
    let prefix = framed.get(..at).unwrap_or_default().to_vec();
    let suffix = framed.get(at + bare.len()..).unwrap_or_default().to_vec();
    Ok((prefix, suffix))
}

fn apply(side: &mut Vec<u32>, wanted: Option<bool>, id: Option<&u32>) {
    match (wanted, id) {
        (Some(true), Some(&id)) if !side.contains(&id) => *side = vec![id],
        (Some(false), _) => side.clear(),
        _ => {}
    }
}

fn is_start_sensitive(library: &tokenizers::Tokenizer) -> Result<bool, TextError> {
    guarded("encode", || {
        let ids = |text: &str| {
            Ok::<_, tokenizers::Error>(library.encode_fast(text, false)?.get_ids().to_vec())
        };
        Ok([ids("\n")?, ids("x")?].concat() != ids("\nx")?)
    })
}
