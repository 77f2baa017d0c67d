//! Where a checkpoint's chat templates are found.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::TemplateError;

/// Larger than any `tokenizer_config.json` (those with all added tokens have 2 MB).
const MAX_FILE_BYTES: u64 = 32 << 20;

/// The name of the template that is used when nothing else is asked for.
const DEFAULT: &str = "default";
/// The name of the template that `transformers` picks when there are tools.
const TOOL_USE: &str = "tool_use";

/// Where a set of templates came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateOrigin {
    /// `chat_template.jinja`, and `additional_chat_templates/*.jinja` beside it.
    JinjaFile,
    /// `chat_template.json`.
    ProcessorJson,
    /// `chat_template` in `tokenizer_config.json`.
    TokenizerConfig,
    /// `tokenizer.chat_template` in GGUF metadata.
    Gguf,
    /// Given by the operator.
    Given,
}

impl fmt::Display for TemplateOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TemplateOrigin::JinjaFile => "chat_template.jinja",
            TemplateOrigin::ProcessorJson => "chat_template.json",
            TemplateOrigin::TokenizerConfig => "tokenizer_config.json",
            TemplateOrigin::Gguf => "GGUF tokenizer.chat_template",
            TemplateOrigin::Given => "given",
        })
    }
}

/// The chat templates of a checkpoint: one, or several with names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSet {
    origin: TemplateOrigin,
    /// Name and text, in the order of the file.
    templates: Vec<(String, String)>,
}

impl TemplateSet {
    /// The templates of the checkpoint in `dir`, or [`TemplateError::None`].
    ///
    /// Order as in `transformers`: a `.jinja` file, then the processor's `chat_template.json`, which also handles
    /// images, then `tokenizer_config.json`.
    pub fn from_directory(dir: &Path) -> Result<Self, TemplateError> {
        if let Some(text) = read(&dir.join("chat_template.jinja"))? {
            let mut templates = vec![(DEFAULT.to_owned(), text)];
            templates.extend(additional(&dir.join("additional_chat_templates"))?);
            return Ok(TemplateSet {
                origin: TemplateOrigin::JinjaFile,
                templates,
            });
        }
        for (name, origin) in [
            ("chat_template.json", TemplateOrigin::ProcessorJson),
            ("tokenizer_config.json", TemplateOrigin::TokenizerConfig),
        ] {
            let Some(text) = read(&dir.join(name))? else {
                continue;
            };
            let file: Value =
                serde_json::from_str(&text).map_err(|error| TemplateError::Invalid {
                    what: name.to_owned(),
                    detail: error.to_string(),
                })?;
            if let Some(set) = TemplateSet::from_json(name, file.get("chat_template"), origin)? {
                return Ok(set);
            }
        }
        Err(TemplateError::None)
    }

    /// The templates of a GGUF file: `tokenizer.chat_template` and `tokenizer.chat_template.<name>`.
    pub fn from_gguf(
        default: Option<&str>,
        named: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, TemplateError> {
        let mut templates: Vec<(String, String)> = default
            .map(|text| (DEFAULT.to_owned(), text.to_owned()))
            .into_iter()
            .collect();
        templates.extend(named);
        if templates.is_empty() {
            return Err(TemplateError::None);
        }
        Ok(TemplateSet {
            origin: TemplateOrigin::Gguf,
            templates,
        })
    }

    /// One template given by the operator, instead of the checkpoint's.
    pub fn from_text(text: impl Into<String>) -> Self {
        TemplateSet {
            origin: TemplateOrigin::Given,
            templates: vec![(DEFAULT.to_owned(), text.into())],
        }
    }

    /// One template from a file given by the operator.
    pub fn from_file(path: &Path) -> Result<Self, TemplateError> {
        let text = read(path)?.ok_or_else(|| TemplateError::Read {
            path: path.to_owned(),
            source: std::io::Error::from(ErrorKind::NotFound),
        })?;
        Ok(TemplateSet::from_text(text))
    }

    /// A template as JSON files hold it: a string, or a list of `{"name", "template"}`.
    fn from_json(
        file: &str,
        value: Option<&Value>,
        origin: TemplateOrigin,
    ) -> Result<Option<Self>, TemplateError> {
        let bad = |detail: &str| TemplateError::Invalid {
            what: file.to_owned(),
            detail: detail.to_owned(),
        };
        let templates = match value {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => vec![(DEFAULT.to_owned(), text.clone())],
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| {
                    let field =
                        |key: &str| item.get(key).and_then(Value::as_str).map(str::to_owned);
                    field("name").zip(field("template"))
                })
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| {
                    bad("an item of `chat_template` lacks the texts `name` and `template`")
                })?,
            Some(_) => return Err(bad("`chat_template` is neither a text nor a list")),
        };
        if templates.is_empty() {
            return Ok(None);
        }
        Ok(Some(TemplateSet { origin, templates }))
    }

    /// Where the set came from.
    pub fn origin(&self) -> TemplateOrigin {
        self.origin
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.templates.iter().map(|(name, _)| name.as_str())
    }

    /// The text of the template to use: the one called `name`; else, with tools, `tool_use` if there is one; else
    /// `default`.
    pub fn select(&self, name: Option<&str>, has_tools: bool) -> Result<&str, TemplateError> {
        let find = |wanted: &str| {
            self.templates
                .iter()
                .find(|(name, _)| name == wanted)
                .map(|(_, text)| text.as_str())
        };
        let found = match name {
            Some(name) => find(name),
            None if has_tools => find(TOOL_USE).or_else(|| find(DEFAULT)),
            None => find(DEFAULT),
        };
        found.ok_or_else(|| TemplateError::NoSuchName {
            wanted: name.unwrap_or(DEFAULT).to_owned(),
            available: self.names().collect::<Vec<_>>().join(", "),
        })
    }
}

fn additional(dir: &Path) -> Result<Vec<(String, String)>, TemplateError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => {
            return Err(TemplateError::Read {
                path: dir.to_owned(),
                source,
            });
        }
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let name = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default()
            .to_owned();
        let is_template = path
            .extension()
            .is_some_and(|extension| extension == "jinja");
        if !is_template || name == DEFAULT {
            continue;
        }
        if let Some(text) = read(&path)? {
            found.push((name, text));
        }
    }
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<Option<String>, TemplateError> {
    let failed = |source| TemplateError::Read {
        path: path.to_owned(),
        source,
    };
    match std::fs::metadata(path) {
        // A pipe would be waited for, a device read without end.
        Ok(metadata) if !metadata.is_file() => {
            let what = std::io::Error::new(ErrorKind::InvalidInput, "expected a regular file");
            return Err(failed(what));
        }
        Ok(metadata) if metadata.len() > MAX_FILE_BYTES => {
            return Err(TemplateError::Invalid {
                what: path.display().to_string(),
                detail: format!("{} bytes, the limit is {MAX_FILE_BYTES}", metadata.len()),
            });
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    std::fs::read_to_string(path).map(Some).map_err(failed)
}
