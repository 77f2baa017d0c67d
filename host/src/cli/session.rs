//! From a resolved model to something that answers: family, backend, memory guard, engine, chat.

use mlxcel_registry::store::Resolved;

use crate::chat::{Answer, ChatSession, ModelText};
use crate::engine::{
    EngineFacts, FinishReason, check_options, check_room, open_model, start_engine,
};

use super::console::Console;
use super::error::CliError;
use super::generation::{GenerationArgs, PromptForm};
use super::memory::{Plan, Verdict, beside};
use super::place::{loader, usable_catalogue};
use super::progress::LoadProgress;
use super::repl::Chat;

/// A loaded model with its conversation.
pub struct Session {
    chat: ChatSession,
    facts: EngineFacts,
    answers: Vec<Answer>,
    wants_profile: bool,
}

/// What the preparation came to.
pub enum Prepared {
    /// Ready to answer.
    Session(Box<Session>),
    /// Only the estimate was wanted, and it was written.
    Estimated,
}

impl Session {
    /// Finds family and backend, checks the memory, and loads the model. The first line on stderr says what runs where.
    pub fn prepare(
        resolved: &Resolved,
        args: &GenerationArgs,
        prompt: PromptForm,
        console: &Console,
    ) -> Result<Prepared, CliError> {
        let chat_options = args.chat_options(prompt)?;
        let catalogue = usable_catalogue(&args.model.plugins, console)?;
        let loader = loader()?;
        let opened = open_model(
            &resolved.path,
            &catalogue,
            &loader,
            args.model.family.family.as_deref(),
        )?;
        let backend = loader.select_backend(&catalogue, &args.model.backend)?;
        tracing::info!("{}", backend.summary);
        let options = args.model.load_options();
        check_options(&opened, &backend, &options)?;
        let guard = Verdict::new(&opened, Some(&backend), Plan::of(&options))?;
        if args.model.estimate_memory {
            console.line(guard.text())?;
            return Ok(Prepared::Estimated);
        }
        if !args.model.force {
            guard.check()?;
        }
        check_room(
            &opened,
            &backend,
            &options,
            guard.estimate.weights_bytes,
            args.model.force,
        )?;
        // Before the weights, which take long: a broken tokenizer is told at once.
        let text = ModelText::of(&opened)?;
        let progress = LoadProgress::new(console);
        let started = start_engine(opened, backend, options, progress.reporter());
        progress.finish();
        let (engine, facts) = started?;
        console.note(headline(resolved, &facts));
        if let Some(text) = shortage(&facts) {
            console.note(text);
        }
        let chat = ChatSession::new(engine, &facts, text, chat_options)?;
        Ok(Prepared::Session(Box::new(Self {
            chat,
            facts,
            answers: Vec::new(),
            wants_profile: args.profile,
        })))
    }

    /// Writes what `--profile` asks for.
    pub fn report(&self, console: &Console) {
        if !self.wants_profile {
            return;
        }
        console.report(format_args!("load: {:.2} s", self.facts.load.as_secs_f64()));
        for answer in &self.answers {
            console.report(profile(answer));
        }
    }
}

impl Chat for Session {
    fn ask(&mut self, text: &str, on_text: &mut dyn FnMut(&str)) -> Result<(), CliError> {
        let answer = self.chat.ask(text, on_text)?;
        if self.wants_profile {
            self.answers.push(answer);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.chat.clear();
    }

    fn stopper(&self) -> Box<dyn Fn() + Send> {
        let cancel = self.chat.cancel_token();
        Box::new(move || cancel.cancel())
    }
}

/// What runs where, for people.
pub fn headline(resolved: &Resolved, facts: &EngineFacts) -> String {
    let model = match &resolved.repo_id {
        Some(id) => id.to_string(),
        None => resolved.path.display().to_string(),
    };
    let (family, backend) = (&facts.family, &facts.backend);
    format!(
        "{model}: family {} {} ({}), backend {} {} on {}, {}{}{}, context {} tokens",
        family.0,
        family.1,
        facts.arch,
        backend.0,
        backend.1,
        facts.device,
        facts.dtype.name(),
        beside(facts.dtype, facts.kv_type),
        match facts.ranks {
            1 => String::new(),
            ranks => format!(", {ranks} ranks"),
        },
        facts.context_tokens
    )
}

/// What is said where less than the context has room.
pub fn shortage(facts: &EngineFacts) -> Option<String> {
    let EngineFacts {
        kv_tokens,
        context_tokens,
        ..
    } = facts;
    (kv_tokens < context_tokens).then(|| {
        format!(
            "the memory for keys and values holds {kv_tokens} of the context's {context_tokens} tokens: longer conversations do not fit"
        )
    })
}

fn profile(answer: &Answer) -> String {
    let stats = &answer.stats;
    let rate = |tokens: usize, seconds: f64| {
        if seconds > 0.0 {
            tokens as f64 / seconds
        } else {
            0.0
        }
    };
    let (prefill_s, decode_s) = (stats.prefill.as_secs_f64(), stats.decode.as_secs_f64());
    let fresh = stats.prompt_tokens.saturating_sub(stats.cached_tokens);
    // The first token comes with the prompt.
    let decoded = stats.generated_tokens.saturating_sub(1);
    format!(
        "prompt: {} tokens ({} cached) in {prefill_s:.3} s, {:.1} tokens/s; answer: {} tokens in {decode_s:.3} s, {:.1} tokens/s; ended by {}",
        stats.prompt_tokens,
        stats.cached_tokens,
        rate(fresh, prefill_s),
        stats.generated_tokens,
        rate(decoded, decode_s),
        reason_text(answer.reason)
    )
}

fn reason_text(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Eos => "the model",
        FinishReason::MaxTokens => "-n",
        FinishReason::ContextFull => "the end of the context",
        FinishReason::StopText => "--stop",
        FinishReason::Cancelled => "Ctrl-C",
    }
}
