//! Architectures of a family and how they register themselves.

use crate::{
    Config, Encode, Error, GgufAdapter, GgufSummary, ModelDesc, Result, Step, Tensor, Weights,
};

/// How well an architecture fits a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// 0: cannot run it; 100: understood in full.
    pub score: u32,
    /// Reason, for people.
    pub why: String,
}

impl Probe {
    /// A fit.
    pub fn fits(score: u32, why: impl Into<String>) -> Self {
        Self {
            score,
            why: why.into(),
        }
    }

    /// Recognised, but not implemented.
    pub fn refused(why: impl Into<String>) -> Self {
        Self {
            score: 0,
            why: why.into(),
        }
    }
}

/// One architecture: pure functions of a configuration, and a loader.
pub trait Architecture: Sync {
    /// How well a configuration whose `model_type` this entry lists fits. Variants that look alike
    /// (a vision block, an embedding head) are told apart here.
    fn probe(&self, config: &Config<'_>) -> Probe;

    /// Validates the configuration and says what the host must know.
    fn describe(&self, config: &Config<'_>) -> Result<ModelDesc>;

    /// Maps a GGUF file.
    fn adapt_gguf(&self, summary: &GgufSummary) -> Result<GgufAdapter> {
        let _ = summary;
        Err(Error::Unsupported {
            what: "GGUF".to_owned(),
            supported: "this architecture loads from safetensors only".to_owned(),
        })
    }

    /// Builds the model.
    fn load(&self, config: &Config<'_>, weights: &Weights) -> Result<Box<dyn Model>>;
}

/// A model on a backend. It keeps no state of any request.
pub trait Model {
    /// Logits `[R, vocabulary]` of the rows that the step asks for.
    fn forward(&self, step: &Step<'_>) -> Result<Tensor>;

    /// Runs the encoder over the features of one request and sets the keys and values of all layers of
    /// cross-attention. Called once before the request's first step, and again if it had to step back.
    fn encode(&self, encode: &Encode<'_>) -> Result<()> {
        let _ = encode;
        Err(Error::Unsupported {
            what: "encoder features".to_owned(),
            supported: "this model has no encoder".to_owned(),
        })
    }
}

/// A registered architecture.
pub struct ArchitectureEntry {
    /// Unique id.
    pub id: &'static str,
    /// What the model does.
    pub task: &'static str,
    /// `model_type` values it may serve.
    pub model_types: &'static [&'static str],
    /// GGUF architecture names it may serve.
    pub gguf: &'static [&'static str],
    /// Whether it can be split over ranks: its layers load their parts ([`crate::nn::Attention`],
    /// [`crate::nn::GatedMlp`], [`crate::nn::Linear::load_inputs`] and `load_outputs`).
    pub tensor_parallel: bool,
    /// Its metadata record.
    pub record: &'static str,
    /// The implementation.
    pub implementation: &'static dyn Architecture,
}

/// Everything registered in this plugin. Filled by [`crate::architecture!`] through link-time
/// collection, which is per cdylib: another plugin's entries are never in it.
#[linkme::distributed_slice]
pub static ARCHITECTURES: [ArchitectureEntry];

/// The entry called `id`.
pub fn find(id: &str) -> Result<&'static ArchitectureEntry> {
    ARCHITECTURES
        .iter()
        .find(|entry| entry.id == id)
        .ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|entry| entry.id).collect();
            Error::Other(format!(
                "this plugin has no architecture \"{id}\"; it has {}",
                known.join(", ")
            ))
        })
}

/// Registers an architecture from its own file: embeds its metadata record in the plugin and adds
/// it to [`ARCHITECTURES`].
///
/// ```ignore
/// architecture! {
///     Llama,
///     id: "llama", display_name: "Llama", category: "dense", task: "text-generation",
///     model_types: ["llama", "mistral"], gguf: ["llama"], aliases: ["Llama 3"],
///     runtimes: ["generate"], modalities_in: ["text"], output: "tokens",
///     backends: ["cpu": "supported"], kv_modes: ["fp16"], tensor_parallel: true,
/// }
/// ```
/// `tensor_parallel` may be left out; it is true where the layers load their parts of a model that is split over ranks.
#[macro_export]
macro_rules! architecture {
    (
        $implementation:path,
        id: $id:literal, display_name: $display:literal, category: $category:literal, task: $task:literal,
        model_types: [$($mt:literal),* $(,)?], gguf: [$($gguf:literal),* $(,)?], aliases: [$($alias:literal),* $(,)?],
        runtimes: [$($runtime:literal),* $(,)?], modalities_in: [$($modality:literal),* $(,)?], output: $output:literal,
        backends: [$($backend:literal : $level:literal),* $(,)?], kv_modes: [$($kv:literal),* $(,)?]
        $(, tensor_parallel: $tensor_parallel:literal)? $(,)?
    ) => {
        const _: () = {
            const TENSOR_PARALLEL: bool = false $(|| $tensor_parallel)?;

            $crate::abi::embed_record! {
                const RECORD = &[
                    "{\"arch\":{\"id\":\"", $crate::abi::metadata::plain($id),
                    "\",\"display_name\":\"", $crate::abi::metadata::plain($display),
                    "\",\"category\":\"", $crate::abi::metadata::plain($category),
                    "\",\"task\":\"", $crate::abi::metadata::plain($task),
                    "\",\"model_types\":", $crate::json_list!($($mt),*),
                    ",\"gguf\":", $crate::json_list!($($gguf),*),
                    ",\"aliases\":", $crate::json_list!($($alias),*),
                    ",\"runtimes\":", $crate::json_list!($($runtime),*),
                    ",\"modalities_in\":", $crate::json_list!($($modality),*),
                    ",\"output\":\"", $crate::abi::metadata::plain($output),
                    "\",\"backends\":", $crate::json_map!($($backend : $level),*),
                    ",\"tensor_parallel\":", if TENSOR_PARALLEL { "true" } else { "false" },
                    ",\"pipeline_parallel\":false,\"drafters\":[],\"kv_modes\":",
                    $crate::json_list!($($kv),*), "}}\n",
                ]
            }

            #[$crate::linkme::distributed_slice($crate::arch::ARCHITECTURES)]
            #[linkme(crate = $crate::linkme)]
            static ENTRY: $crate::ArchitectureEntry = $crate::ArchitectureEntry {
                id: $id,
                task: $task,
                model_types: &[$($mt),*],
                gguf: &[$($gguf),*],
                tensor_parallel: TENSOR_PARALLEL,
                record: RECORD,
                implementation: &$implementation,
            };
        };
    };
}

/// JSON list of literals, at compile time.
#[doc(hidden)]
#[macro_export]
macro_rules! json_list {
    () => { "[]" };
    ($first:literal $(, $rest:literal)*) => { concat!("[\"", $first, "\"" $(, ",\"", $rest, "\"")*, "]") };
}

/// JSON object of literals, at compile time.
#[doc(hidden)]
#[macro_export]
macro_rules! json_map {
    () => { "{}" };
    ($k:literal : $v:literal $(, $ks:literal : $vs:literal)*) => {
        concat!("{\"", $k, "\":\"", $v, "\"" $(, ",\"", $ks, "\":\"", $vs, "\"")*, "}")
    };
}
