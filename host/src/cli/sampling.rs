//! Flags of sampling, the same for the commands that answer and for the server.
//!
//! Owns names and what they mean.

use clap::Args;

use crate::sampling::{LogitBias, Mirostat, SamplerOrder, SamplingParams, SequenceBreakers};

use super::error::CliError;

/// Samplers whose defaults are the same everywhere.
#[derive(Debug, Clone, Args)]
pub struct SamplerArgs {
    /// Keep the tokens whose surprise is nearest to the expected one, up to this probability; 1 keeps all
    #[arg(
        long,
        alias = "typical",
        value_name = "P",
        default_value_t = 1.0,
        allow_negative_numbers = true, value_parser = within(0.0, 1.0))]
    typical_p: f32,
    /// Keep logits within this many standard deviations of the best one; 0 or less keeps all
    #[arg(long, alias = "top-nsigma", value_name = "N", default_value_t = -1.0, allow_negative_numbers = true, value_parser = within(-1e6, 1e6))]
    top_n_sigma: f32,
    /// How often the likeliest tokens are dropped for less likely ones (XTC); 0 is never
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.0,
        allow_negative_numbers = true, value_parser = within(0.0, 1.0))]
    xtc_probability: f32,
    /// Then of the tokens with at least this probability all but the least likely go
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.1,
        allow_negative_numbers = true, value_parser = within(0.0, 1.0))]
    xtc_threshold: f32,
    /// Move the temperature by up to this much in both directions with the entropy; 0 is off
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true, value_parser = within(0.0, 100.0))]
    dynatemp_range: f32,
    /// Power of the entropy's share in that
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        allow_negative_numbers = true, value_parser = within(0.0, 100.0))]
    dynatemp_exp: f32,
    /// Subtract this from the logits of tokens that occurred, once for each time; 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true, value_parser = within(-100.0, 100.0))]
    frequency_penalty: f32,
    /// Subtract this from the logits of tokens that occurred; 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true, value_parser = within(-100.0, 100.0))]
    presence_penalty: f32,
    /// How many of the last tokens the penalties look at; 0 is none, -1 is all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..)
    )]
    repeat_last_n: i32,
    /// Penalty for continuing a repetition (DRY); 0 is off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true, value_parser = within(0.0, 100.0))]
    dry_multiplier: f32,
    /// Factor of that penalty for each further token of the repetition
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.75,
        allow_negative_numbers = true, value_parser = within(1.0, 100.0))]
    dry_base: f32,
    /// Length of a repetition from which the penalty grows
    #[arg(long, value_name = "N", default_value_t = 2)]
    dry_allowed_length: u32,
    /// Text at which repetitions end, in place of line break, colon, double quote and asterisk; may be repeated, `none` is no text
    #[arg(long, value_name = "TEXT")]
    dry_sequence_breaker: Vec<String>,
    /// Mirostat 1 or 2 in place of all samplers but the temperature; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..=2))]
    mirostat: i64,
    /// Surprise in bits that mirostat aims for
    #[arg(
        long,
        value_name = "BITS",
        default_value_t = 5.0,
        allow_negative_numbers = true, value_parser = within(0.0, 100.0))]
    mirostat_ent: f32,
    /// How fast mirostat learns
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.1,
        allow_negative_numbers = true, value_parser = within(0.0, 100.0))]
    mirostat_lr: f32,
    /// Probability that tokens should have (adaptive-p); less than 0 is off
    #[arg(long, value_name = "P", default_value_t = -1.0, allow_negative_numbers = true, value_parser = within(-1e6, 1.0))]
    adaptive_target: f32,
    /// How much adaptive-p keeps of what it has learnt, from token to token
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.9,
        allow_negative_numbers = true, value_parser = within(0.0, 0.99))]
    adaptive_decay: f32,
    /// Samplers in the order in which they work, by name
    #[arg(long, value_name = "NAME;...", default_value_t = SamplerOrder::default())]
    samplers: SamplerOrder,
    /// The same by letter: penalties e, dry d, top_n_sigma s, top_k k, typ_p y, top_p p, min_p m, xtc x, temperature t
    #[arg(long, alias = "sampling-seq", value_name = "LETTERS", conflicts_with = "samplers", value_parser = SamplerOrder::from_letters)]
    sampler_seq: Option<SamplerOrder>,
    /// Add to the logit of a token, for example 15043+1, 15043-1 or 15043-inf, which forbids it; may be repeated
    #[arg(short = 'l', long, value_name = "TOKEN+BIAS", value_parser = bias)]
    logit_bias: Vec<LogitBias>,
    /// Seed of the random numbers, to get the same answer again; -1 is another one each time
    #[arg(short = 's', long, value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    seed: i64,
    /// Go on where the model would end
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplerArgs {
    /// Puts them over what the command's own flags say, and checks everything.
    pub fn over(&self, params: SamplingParams) -> Result<SamplingParams, CliError> {
        let usage = |text: String| CliError::usage(text);
        let params = SamplingParams {
            typical_p: self.typical_p,
            top_n_sigma: self.top_n_sigma,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exp,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            repeat_last_n: self.repeat_last_n,
            dry_multiplier: self.dry_multiplier,
            dry_base: self.dry_base,
            dry_allowed_length: self.dry_allowed_length,
            dry_sequence_breakers: self.breakers()?,
            mirostat: Mirostat::of(self.mirostat).unwrap_or_default(),
            mirostat_tau: self.mirostat_ent,
            mirostat_eta: self.mirostat_lr,
            adaptive_target: self.adaptive_target,
            adaptive_decay: self.adaptive_decay,
            samplers: self.sampler_seq.as_ref().unwrap_or(&self.samplers).clone(),
            logit_bias: self.logit_bias.clone(),
            // -1 asks for a random one; other negative numbers are seeds like any.
            seed: (self.seed != -1).then_some(self.seed as u64),
            ..params
        };
        params
            .validate(usize::MAX)
            .map_err(|error| usage(error.to_string()))?;
        if params.dry_multiplier != 0.0 && params.dry_penalty_last_n == 0 {
            let text = "--dry-multiplier has no effect while --dry-penalty-last-n is 0: say how many tokens DRY looks at, or -1 for all";
            return Err(usage(text.to_owned()));
        }
        Ok(params)
    }

    fn breakers(&self) -> Result<SequenceBreakers, CliError> {
        if self.dry_sequence_breaker.is_empty() {
            return Ok(SequenceBreakers::default());
        }
        let texts = self.dry_sequence_breaker.iter();
        let texts = texts.filter(|text| *text != "none").cloned().collect();
        SequenceBreakers::checked(texts)
            .map_err(|error| CliError::usage(format!("--dry-sequence-breaker: {error}")))
    }

    /// Whether the model's own ends do not end an answer.
    pub fn ignore_eos(&self) -> bool {
        self.ignore_eos
    }
}

/// A number within bounds, which are those that [`SamplingParams::validate`] has too.
fn within(low: f32, high: f32) -> impl Fn(&str) -> Result<f32, String> + Clone {
    move |text| {
        let value: f32 = text.parse().map_err(|_| "expected a number".to_owned())?;
        match (low..=high).contains(&value) {
            true => Ok(value),
            false => Err(format!("expected a number from {low} to {high}")),
        }
    }
}

fn bias(text: &str) -> Result<LogitBias, String> {
    let wanted = || "expected a token id and a number with its sign, such as 15043-1".to_owned();
    let at = text.find(['+', '-']).ok_or_else(wanted)?;
    let (token, bias) = text.split_at(at);
    Ok(LogitBias {
        token: token.parse().map_err(|_| wanted())?,
        bias: bias.parse().map_err(|_| wanted())?,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        samplers: SamplerArgs,
    }

    fn read(args: &[&str]) -> Result<SamplingParams, String> {
        let flags = Flags::try_parse_from([&["x"], args].concat()).map_err(|e| e.to_string())?;
        let params = flags.samplers.over(SamplingParams::server());
        params.map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_nothing_changes() {
        assert_eq!(read(&[]).unwrap(), SamplingParams::server());
        let cli = Flags::parse_from(["x"]).samplers;
        assert_eq!(
            cli.over(SamplingParams::cli()).unwrap(),
            SamplingParams::cli()
        );
    }

    #[test]
    fn every_flag_arrives_where_it_belongs() {
        let params = read(&[
            "--typical-p=0.01",
            "--top-n-sigma=0.02",
            "--xtc-probability=0.03",
            "--xtc-threshold=0.04",
            "--dynatemp-range=0.05",
            "--dynatemp-exp=0.06",
            "--frequency-penalty=-0.07",
            "--presence-penalty=0.08",
            "--repeat-last-n=9",
            "--dry-multiplier=0.1",
            "--dry-base=1.11",
            "--dry-allowed-length=12",
            "--dry-sequence-breaker=x",
            "--dry-sequence-breaker=y",
            "--mirostat=2",
            "--mirostat-ent=0.15",
            "--mirostat-lr=0.16",
            "--adaptive-target=0.17",
            "--adaptive-decay=0.18",
            "--samplers=top_k;temp",
            "--logit-bias=20+0.5",
            "-l",
            "21-inf",
            "--seed=22",
        ]);
        insta::assert_debug_snapshot!(params.unwrap(), @r#"
        SamplingParams {
            temperature: 0.8,
            dynatemp_range: 0.05,
            dynatemp_exponent: 0.06,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 0.01,
            top_n_sigma: 0.02,
            xtc_probability: 0.03,
            xtc_threshold: 0.04,
            min_keep: 0,
            repetition_penalty: 1.0,
            frequency_penalty: -0.07,
            presence_penalty: 0.08,
            repeat_last_n: 9,
            dry_multiplier: 0.1,
            dry_base: 1.11,
            dry_allowed_length: 12,
            dry_penalty_last_n: 64,
            dry_sequence_breakers: SequenceBreakers {
                texts: [
                    "x",
                    "y",
                ],
                tokens: None,
            },
            mirostat: V2,
            mirostat_tau: 0.15,
            mirostat_eta: 0.16,
            adaptive_target: 0.17,
            adaptive_decay: 0.18,
            samplers: SamplerOrder(
                [
                    TopK,
                    Temperature,
                ],
            ),
            logit_bias: [
                LogitBias {
                    token: 20,
                    bias: 0.5,
                },
                LogitBias {
                    token: 21,
                    bias: -inf,
                },
            ],
            seed: Some(
                22,
            ),
            logprobs: None,
        }
        "#);
    }

    #[test]
    fn other_spellings() {
        assert_eq!(
            read(&["--sampler-seq", "kt"]).unwrap().samplers.to_string(),
            "top_k;temperature"
        );
        assert_eq!(
            read(&["--samplers", "kt"]).unwrap().samplers.to_string(),
            "top_k;temperature"
        );
        assert_eq!(read(&["--seed", "-1"]).unwrap().seed, None);
        assert_eq!(read(&["--seed", "-2"]).unwrap().seed, Some(u64::MAX - 1));
        let none = read(&["--dry-sequence-breaker", "none"]).unwrap();
        assert!(none.dry_sequence_breakers.texts().is_empty());
    }

    #[test]
    fn what_cannot_be_honoured_is_refused() {
        for args in [
            &["--typical-p", "1.5"][..],
            &["--mirostat", "3"],
            &["--dry-base", "0.5"],
            &["--adaptive-decay", "1"],
            &["--samplers", "top_k;infill"],
            &["--sampler-seq", "kz"],
            &["--sampler-seq", "k", "--samplers", "k"],
            &["--logit-bias", "7"],
            &["--logit-bias", "x+1"],
            &["--logit-bias", "7+inf"],
            &["--repeat-last-n", "-2"],
            &["--dry-sequence-breaker", ""],
        ] {
            assert!(read(args).is_err(), "{args:?}");
        }
        let flags = Flags::parse_from(["x", "--dry-multiplier", "0.8"]).samplers;
        assert!(
            flags
                .over(SamplingParams::cli())
                .unwrap_err()
                .to_string()
                .contains("--dry-penalty-last-n")
        );
        assert!(flags.over(SamplingParams::server()).is_ok());
    }
}
