//! Pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.
//!
//! Each entry registers itself with `inventory`, so adding one is adding a `submit!` and nothing else. The patterns are
//! those of the models' own `tokenizer.json`; the names are the ones that llama.cpp's converter writes.

/// How a text is brought into one Unicode form first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnicodeForm {
    /// Left as it is.
    AsGiven,
    /// NFC.
    Composed,
}

/// One step of cutting a text into words.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    /// Every match, and what lies between matches, is a word.
    Regex(&'static str),
    /// Every digit is a word.
    EachDigit,
}

/// What a name stands for.
#[derive(Debug)]
pub(super) struct Dialect {
    /// The names in GGUF files.
    pub(super) names: &'static [&'static str],
    pub(super) steps: &'static [Step],
    pub(super) unicode: UnicodeForm,
    /// A word that is a token is taken whole, without merging.
    pub(super) ignore_merges: bool,
    /// BOS is put in front where the file does not say.
    pub(super) add_bos: bool,
}

inventory::collect!(Dialect);

/// The dialect called `name`.
pub(super) fn find(name: &str) -> Option<&'static Dialect> {
    inventory::iter::<Dialect>
        .into_iter()
        .find(|dialect| dialect.names.contains(&name))
}

/// All names of `tokenizer.ggml.pre` that can be rebuilt, sorted.
pub fn known_pre_tokenizers() -> Vec<&'static str> {
    let mut names: Vec<&str> = inventory::iter::<Dialect>
        .into_iter()
        .flat_map(|dialect| dialect.names.iter().copied())
        .collect();
    names.sort_unstable();
    names
}

impl Dialect {
    /// GPT-2's way; the entries below change what differs.
    const fn new(names: &'static [&'static str], steps: &'static [Step]) -> Self {
        Dialect {
            names,
            steps,
            unicode: UnicodeForm::AsGiven,
            ignore_merges: false,
            add_bos: false,
        }
    }

    const fn composed(mut self) -> Self {
        self.unicode = UnicodeForm::Composed;
        self
    }

    const fn whole_words(mut self) -> Self {
        self.ignore_merges = true;
        self
    }

    const fn with_bos(mut self) -> Self {
        self.add_bos = true;
        self
    }
}

/// English contractions as GPT-4 and Llama 3 cut them.
macro_rules! contractions {
    () => {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

/// Words with case: capitals then small letters (GPT-4o, Tekken). `$tail` may take a contraction along.
macro_rules! cased_words {
    ($tail:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $tail,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $tail
        )
    };
}

/// The words of GPT-2.
const GPT2_WORDS: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Signs, line ends and blanks as GPT-4 cuts them.
macro_rules! signs_and_blanks {
    () => {
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}

/// DeepSeek LLM's letters with case. Their file lists the ranges of an older Unicode one by one; these are the same
/// letters as classes, less Georgian and the mathematical alphabets, which are not in the list.
const DEEPSEEK_CASED: &str = r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{10D0}-\x{10FF}\x{1D400}-\x{1D7FF}]]+";

/// The DeepSeek V3 words: a sign sticks to the Latin letters behind it, marks count as letters.
const DEEPSEEK_V3_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

// Files written before the name existed. llama.cpp cuts signs and threes of digits apart here.
inventory::submit! { Dialect::new(&["default"], &[
    Step::Regex(r"[\p{P}$+<=>^~|]+"), Step::Regex(GPT2_WORDS), Step::Regex(r"\p{N}+"), Step::Regex("[0-9][0-9][0-9]"),
]) }
inventory::submit! { Dialect::new(
    &["gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "mellum", "a.x-4.0", "exaone4",
      "jais", "trillion", "granite-docling"],
    &[Step::Regex(GPT2_WORDS)],
) }
inventory::submit! { Dialect::new(&["olmo", "mpt", "modern-bert"], &[Step::Regex(GPT2_WORDS)]).composed() }
inventory::submit! { Dialect::new(
    &["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
    &[Step::EachDigit, Step::Regex(GPT2_WORDS)],
) }
inventory::submit! { Dialect::new(&["command-r"], &[Step::EachDigit, Step::Regex(GPT2_WORDS)]).composed() }
inventory::submit! { Dialect::new(
    &["falcon"],
    &[Step::Regex(r"[\p{P}$+<=>^~|`]+"), Step::Regex(GPT2_WORDS), Step::Regex("[0-9][0-9][0-9]")],
) }
inventory::submit! { Dialect::new(
    &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
    &[Step::Regex(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|", signs_and_blanks!()))],
).whole_words().with_bos() }
inventory::submit! { Dialect::new(
    &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
    &[Step::Regex(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|", signs_and_blanks!()))],
) }
inventory::submit! { Dialect::new(
    &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"],
    &[Step::Regex(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|", signs_and_blanks!()))],
).composed() }
inventory::submit! { Dialect::new(
    &["hunyuan", "solar-open", "grok-2"],
    &[Step::Regex(concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|", signs_and_blanks!()))],
) }
inventory::submit! { Dialect::new(
    &["qwen35"],
    &[Step::Regex(concat!(
        contractions!(),
        r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ))],
).composed() }
inventory::submit! { Dialect::new(
    &["deepseek-llm"],
    &[
        Step::Regex(r"[\r\n]"),
        Step::Regex(DEEPSEEK_CASED),
        Step::Regex(r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"),
        Step::Regex(r"\s+$"),
        Step::Regex(r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"),
        Step::EachDigit,
    ],
) }
inventory::submit! { Dialect::new(
    &["deepseek-coder"],
    &[
        Step::Regex(r"[\r\n]"),
        Step::Regex(r"\s?\p{L}+"),
        Step::Regex(r"\s?\p{P}+"),
        Step::Regex(r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"),
        Step::EachDigit,
    ],
) }
inventory::submit! { Dialect::new(
    &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
    &[Step::Regex(r"\p{N}{1,3}"), Step::Regex(r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"), Step::Regex(DEEPSEEK_V3_WORDS)],
) }
inventory::submit! { Dialect::new(
    &["tekken"],
    &[Step::Regex(concat!(
        cased_words!(""),
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ))],
).whole_words().with_bos() }
inventory::submit! { Dialect::new(
    &["gpt-4o", "llama4", "kanana2", "minimax-m2"],
    &[Step::Regex(concat!(
        cased_words!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ))],
) }
inventory::submit! { Dialect::new(
    &["bailingmoe", "bailingmoe2", "llada-moe"],
    &[Step::Regex(concat!(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]",
        r"|\s+(?!\S)|\s+"
    ))],
) }
inventory::submit! { Dialect::new(
    &["seed-coder"],
    &[Step::Regex(concat!(
        contractions!(),
        r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ))],
) }
