//! Replies to one conversation at a time, generated with the scheduler directly, without HTTP or
//! threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use chat::conversation::{Conversation, Message};
use chat::reply::{FinishReason, Reply, ReplyConfig, ReplyDelta};
use chat::request::SamplingParams;
use contract::Runner;
use decode::{
    Event, InitialPhase, Job, JobId, Scheduler, SchedulerConfig, SchedulerState, SpeculationConfig,
};

use crate::commands::caching;
use crate::ids;
use crate::open::drafting;
use crate::text::model_context::ModelContext;
use crate::text::prepare;
use crate::text::reply::{Choice, ChoiceConfig, Part};
use crate::text::sampling_params;

/// Options of every reply.
#[derive(Debug, Clone, Default)]
pub(super) struct ReplyOptions {
    /// The most tokens; `None` for the model's default.
    pub max_tokens: Option<usize>,
    /// Sampling temperature; `None` for the model's default, here and below.
    pub temperature: Option<f32>,
    /// Probability mass of the tokens to draw from.
    pub top_p: Option<f32>,
    /// Number of tokens to draw from; 0 is all.
    pub top_k: Option<usize>,
    /// Least probability of a token relative to the likeliest.
    pub min_p: Option<f32>,
    /// Sampling seed; `None` for a random one per reply.
    pub seed: Option<u64>,
    /// Whether to reason; `None` leaves it to the chat template.
    pub thinking: Option<bool>,
}

/// A model that generates replies.
pub(super) struct ReplyGenerator {
    scheduler: Scheduler,
    model: ModelContext,
    next_job: u64,
}

/// A reply and its timings.
#[derive(Debug)]
pub(super) struct TimedReply {
    /// Reasoning and text.
    pub reply: Reply,
    /// The finish reason; `None` if the reply was cancelled.
    pub finish: Option<FinishReason>,
    /// Tokens of the prompt, and the time to the first token of the reply.
    pub prompt: (usize, Duration),
    /// Tokens after the first, and their time.
    pub generated: (usize, Duration),
}

impl ReplyGenerator {
    /// A generator on an opened runner and the text side of the same model.
    pub(super) fn new(
        runner: Box<dyn Runner>,
        model: ModelContext,
        speculation: SpeculationConfig,
    ) -> ReplyGenerator {
        let config = SchedulerConfig {
            speculation,
            max_sequences: 1,
            prefill_chunk: runner.info().limits.prefill_chunk,
            eos: model.eos.clone(),
            prefix: caching::for_conversation(&model),
            // The cost model sizes trees by the time of decode steps.
            clock: Some(drafting::clock),
            ..SchedulerConfig::default()
        };
        ReplyGenerator {
            scheduler: Scheduler::new(runner, config),
            model,
            next_job: 0,
        }
    }

    /// Generates a reply to a conversation.
    ///
    /// `on_delta` gets each delta as soon as it is final. Generation ends early once
    /// `is_cancelled`, which is called between steps, returns true.
    ///
    /// # Errors
    /// If the prompt is invalid or too long, the device fails, or `on_delta` fails.
    pub(super) fn generate(
        &mut self,
        messages: &[Message],
        options: &ReplyOptions,
        on_delta: &mut dyn FnMut(&ReplyDelta) -> std::io::Result<()>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> anyhow::Result<TimedReply> {
        let conversation = Conversation {
            messages: messages.to_vec(),
            enable_thinking: options.thinking.or(self.model.defaults.thinking),
            add_generation_prompt: true,
            now_unix: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            ..Conversation::default()
        };
        let rendered = self.model.template.render(&conversation)?;
        let phase = prepare::initial_phase(&self.model, &rendered, &conversation);
        let prompt = self.model.tokenizer.encode_rendered(&rendered)?;
        let n_prompt = prompt.len();
        let mut choice = Choice::new(&ChoiceConfig {
            tokenizer: Arc::clone(&self.model.tokenizer),
            reply_config: ReplyConfig {
                starts_in_reasoning: rendered
                    .opens_reasoning(self.model.tokenizer.reasoning_tags()),
                split_reasoning: true,
                ..ReplyConfig::default()
            },
            stop_tokens: Vec::new(),
            keeps_token_ids: false,
            logprobs: false,
        });
        let id = JobId(self.next_job);
        self.next_job += 1;
        tracing::debug!(prompt_tokens = n_prompt, "generating");
        let start = Instant::now();
        self.scheduler.submit(Job {
            id,
            params: self.generation_params((n_prompt, phase), options)?,
            prompt: prompt.into(),
            choices: 1,
            priority: 0,
        })?;
        let mut timed = TimedReply {
            reply: Reply::default(),
            finish: None,
            prompt: (n_prompt, Duration::ZERO),
            generated: (0, Duration::ZERO),
        };
        let mut first: Option<Instant> = None;
        let mut forward = |timed: &mut TimedReply, parts: Vec<Part>| -> std::io::Result<()> {
            for part in parts {
                on_delta(&part.delta)?;
                timed.reply.push(part.delta);
            }
            Ok(())
        };
        let mut events = Vec::new();
        let mut cancelled = false;
        loop {
            if !cancelled && is_cancelled() {
                cancelled = true;
                self.scheduler.cancel(id);
            }
            let progress = self.scheduler.step(&mut events)?;
            for (_, event) in events.drain(..) {
                match event {
                    Event::Tokens { tokens, .. } => {
                        let now = Instant::now();
                        match first {
                            None => {
                                first = Some(now);
                                timed.prompt.1 = now - start;
                                timed.generated.0 += tokens.len() - 1;
                            }
                            Some(first) => {
                                timed.generated.0 += tokens.len();
                                timed.generated.1 = now - first;
                            }
                        }
                        let parts = choice.push(tokens);
                        forward(&mut timed, parts)?;
                    }
                    Event::Finished { reason, .. } => {
                        let (parts, reason) = choice.finish(reason);
                        forward(&mut timed, parts)?;
                        timed.finish = (!cancelled).then_some(reason);
                    }
                    Event::Failed { error } => bail!(error),
                    Event::Started { .. } | Event::Prefill { .. } | Event::PromptLogprobs(_) => {}
                }
            }
            if progress == SchedulerState::Idle {
                return Ok(timed);
            }
        }
    }

    fn generation_params(
        &self,
        (n_prompt, phase): (usize, InitialPhase),
        options: &ReplyOptions,
    ) -> anyhow::Result<decode::GenerationParams> {
        let info = self.scheduler.info();
        let remaining = sampling_params::remaining_context(n_prompt, info.limits.context)?;
        let fields = SamplingParams {
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            seed: options.seed,
            ..SamplingParams::default()
        };
        let default = self.model.defaults.max_tokens.unwrap_or(remaining);
        let max_tokens = options.max_tokens.unwrap_or(default).min(remaining);
        let defaults = self.model.defaults.of_reply(phase);
        Ok(sampling_params::generation_params(
            &fields, &defaults, max_tokens, info.vocab,
        )?)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::open;
    use crate::settings::GenerationDefaults;
    use chat::conversation::Role;
    use contract::{Backend, KvFormat, KvFormats, Limits, LoadConfig};

    pub(in crate::commands) fn generator() -> ReplyGenerator {
        let loaded = open::tiny();
        let model = open::text_side(&loaded, None, None, GenerationDefaults::default()).unwrap();
        let config = LoadConfig {
            target: loaded.spec,
            weights: loaded.weights,
            draft: None,
            batch_invariant: false,
            kv: KvFormats {
                k: KvFormat::F16,
                v: KvFormat::F16,
            },
            limits: Limits {
                sequences: 1,
                context: 256,
                tree_nodes: 1,
                prefill_chunk: 64,
                pool_tokens: None,
            },
        };
        let cpu = cpu::CpuBackend::new(cpu::CpuOptions {
            reference: false,
            threads: Some(1),
        });
        ReplyGenerator::new(
            cpu.open(config, &mut |_| {}).unwrap(),
            model,
            SpeculationConfig::default(),
        )
    }

    fn hello() -> Vec<Message> {
        vec![Message::new(Role::User, "Hello")]
    }

    #[test]
    fn deltas_joined_equal_the_reply_and_a_seed_repeats_it() {
        let options = ReplyOptions {
            max_tokens: Some(12),
            seed: Some(3),
            ..ReplyOptions::default()
        };
        let mut generator = generator();
        let mut joined = Reply::default();
        let mut on_delta = |piece: &ReplyDelta| {
            joined.push(piece.clone());
            Ok(())
        };
        let first = generator
            .generate(&hello(), &options, &mut on_delta, &|| false)
            .unwrap();
        assert_eq!(first.finish, Some(FinishReason::Length));
        assert_eq!((first.generated.0, first.prompt.0 > 0), (11, true));
        assert_eq!(first.reply, joined);
        let again = generator
            .generate(&hello(), &options, &mut |_| Ok(()), &|| false)
            .unwrap();
        assert_eq!(again.reply, first.reply);
    }

    #[test]
    fn cancelled_reply_ends_early_and_the_next_one_is_whole() {
        let options = ReplyOptions {
            max_tokens: Some(100),
            // With a random seed, the reply sometimes ends before the limit.
            seed: Some(3),
            ..ReplyOptions::default()
        };
        let mut generator = generator();
        let calls = std::cell::Cell::new(0);
        let is_cancelled = || {
            calls.set(calls.get() + 1);
            calls.get() > 5
        };
        let reply = generator
            .generate(&hello(), &options, &mut |_| Ok(()), &is_cancelled)
            .unwrap();
        assert_eq!(reply.finish, None);
        assert!(reply.generated.0 < 10);
        let next = generator
            .generate(&hello(), &options, &mut |_| Ok(()), &|| false)
            .unwrap();
        assert_eq!(next.generated.0, 99);
    }

    #[test]
    fn conversation_beyond_the_context_is_refused_with_both_lengths() {
        let options = ReplyOptions::default();
        let mut generator = generator();
        let long = vec![Message::new(Role::User, "word ".repeat(400))];
        let error = generator
            .generate(&long, &options, &mut |_| Ok(()), &|| false)
            .unwrap_err()
            .to_string();
        assert!(error.contains("256"), "{error}");
    }
}
