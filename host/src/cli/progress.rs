//! Progress on stderr: a bar where a person watches, a few plain lines where not.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use mlxcel_registry::store::{Progress, ProgressEvent};

use super::console::Console;
use super::table::{bytes_text, counted};

/// Variable that switches bars off.
const OFF: &str = "MLXCEL_NO_PROGRESS";

/// Whether bars are drawn.
fn draws(console: &Console) -> bool {
    let is_off = match std::env::var(OFF) {
        Ok(value) => !matches!(
            value.trim().to_ascii_lowercase().as_str(),
            "" | "0" | "false" | "no" | "off"
        ),
        Err(std::env::VarError::NotPresent) => false,
        Err(std::env::VarError::NotUnicode(_)) => true,
    };
    !is_off && !console.is_quiet() && std::io::stderr().is_terminal()
}

fn bar(length: Option<u64>, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Shows a download.
pub struct DownloadProgress<'a> {
    console: &'a Console,
    is_drawn: bool,
    bar: Option<ProgressBar>,
}

impl<'a> DownloadProgress<'a> {
    /// Nothing is shown before the first event.
    pub fn new(console: &'a Console) -> Self {
        Self {
            console,
            is_drawn: draws(console),
            bar: None,
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| self.console.note(text)),
            None => self.console.note(text),
        }
    }

    fn planned(&mut self, files: usize, total_bytes: Option<u64>, present_bytes: u64) {
        let size = total_bytes.map_or_else(|| "unknown size".to_owned(), bytes_text);
        let here = match present_bytes {
            0 => String::new(),
            present => format!(", {} of it already here", bytes_text(present)),
        };
        self.note(&format!(
            "downloading {}, {size}{here}",
            counted(files, "file")
        ));
        if self.is_drawn {
            let template = match total_bytes {
                Some(_) => {
                    "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} eta {eta} {msg}"
                }
                None => "{spinner} {binary_bytes} {binary_bytes_per_sec} {msg}",
            };
            let bar = bar(total_bytes, template);
            bar.enable_steady_tick(Duration::from_millis(200));
            bar.set_position(present_bytes);
            bar.reset_eta();
            self.bar = Some(bar);
        }
    }
}

impl Progress for DownloadProgress<'_> {
    fn event(&mut self, event: &ProgressEvent<'_>) {
        match *event {
            ProgressEvent::Planned {
                files,
                total_bytes,
                present_bytes,
            } => {
                self.planned(files, total_bytes, present_bytes);
            }
            ProgressEvent::FileStarted { file, .. } => {
                if let Some(bar) = &self.bar {
                    bar.set_message(file.to_owned());
                }
            }
            ProgressEvent::Received { bytes, .. } => {
                if let Some(bar) = &self.bar {
                    bar.inc(bytes);
                }
            }
            ProgressEvent::FileRestarted {
                file,
                lost_bytes,
                reason,
            } => {
                if let Some(bar) = &self.bar {
                    bar.set_position(bar.position().saturating_sub(lost_bytes));
                }
                self.note(&format!("{file} starts over: {reason}"));
            }
            ProgressEvent::Retrying {
                what,
                attempt,
                delay_ms,
                reason,
            } => {
                self.note(&format!(
                    "{what}: {reason}; attempt {attempt} in {delay_ms} ms"
                ));
            }
            ProgressEvent::Finishing => {
                if let Some(bar) = &self.bar {
                    bar.set_message("finishing");
                }
            }
            // Events of later versions of the store need no line.
            _ => {}
        }
    }
}

/// Shows how many tensors of a model are loaded.
pub struct LoadProgress {
    bar: Option<ProgressBar>,
}

impl LoadProgress {
    /// A bar, unless there is nobody to see it.
    pub fn new(console: &Console) -> Self {
        Self {
            bar: draws(console).then(|| bar(None, "loading {bar:30} {pos}/{len} tensors")),
        }
    }

    /// What the engine calls while it loads.
    pub fn reporter(&self) -> impl Fn(usize, usize) + Send + 'static {
        let bar = self.bar.clone();
        move |done, total| {
            if let Some(bar) = &bar {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
