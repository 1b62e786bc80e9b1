//! One answer after another, straight over the scheduler: no HTTP, no threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use chat::conversation::{Conversation, Message};
use chat::reply::{FinishReason, Reply, ReplyConfig, ReplyDelta};
use chat::request::SamplingParams;
use contract::Runner;
use decode::{Event, Job, JobId, Progress, Scheduler, SchedulerConfig, Speculation};

use crate::commands::caching;
use crate::ids;
use crate::open::drafting;
use crate::text::model_context::ModelContext;
use crate::text::reply::{Choice, ChoiceConfig, Part};
use crate::text::sampling_params;

/// What is asked of every answer.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted {
    /// Most tokens; `None` for what is usual for the model.
    pub max_tokens: Option<usize>,
    /// Sampling temperature; `None` for what is usual.
    pub temperature: Option<f32>,
    /// `None` for a random one each time.
    pub seed: Option<u64>,
    /// Whether to think; `None` leaves it to the template.
    pub thinking: Option<bool>,
}

/// A model that answers.
pub(super) struct Answerer {
    scheduler: Scheduler,
    model: ModelContext,
    wanted: Wanted,
    next_job: u64,
}

/// An answer and what it took.
#[derive(Debug)]
pub(super) struct Answer {
    /// Thinking and text.
    pub reply: Reply,
    /// Why it ended; `None` if it was cut off.
    pub ended: Option<FinishReason>,
    /// Tokens of the prompt, and how long until the first token of the answer.
    pub prompt: (usize, Duration),
    /// Tokens after the first, and how long they took.
    pub generated: (usize, Duration),
}

impl Answerer {
    /// Takes an opened runner and the text side of the same model.
    pub(super) fn new(
        runner: Box<dyn Runner>,
        model: ModelContext,
        wanted: Wanted,
        speculation: Speculation,
    ) -> Answerer {
        let config = SchedulerConfig {
            speculation,
            max_sequences: 1,
            prefill_chunk: runner.info().limits.prefill_chunk,
            eos: model.eos.clone(),
            prefix: caching::of_talk(&model),
            // Trees stop by what rounds take.
            clock: Some(drafting::clock),
            ..SchedulerConfig::default()
        };
        Answerer {
            scheduler: Scheduler::new(runner, config),
            model,
            wanted,
            next_job: 0,
        }
    }

    /// Answers a conversation. `say` gets each piece as it becomes certain; `cut` is asked between steps
    /// whether the answer is no longer wanted.
    pub(super) fn answer(
        &mut self,
        messages: &[Message],
        say: &mut dyn FnMut(&ReplyDelta) -> std::io::Result<()>,
        cut: &dyn Fn() -> bool,
    ) -> anyhow::Result<Answer> {
        let rendered = self.model.template.render(&Conversation {
            messages: messages.to_vec(),
            enable_thinking: self.wanted.thinking.or(self.model.defaults.thinking),
            add_generation_prompt: true,
            now_unix: i64::try_from(ids::unix_now()).unwrap_or(i64::MAX),
            ..Conversation::default()
        })?;
        let prompt = self.model.tokenizer.encode_rendered(&rendered)?;
        let n_prompt = prompt.len();
        let mut choice = Choice::new(&ChoiceConfig {
            tokenizer: Arc::clone(&self.model.tokenizer),
            reply_config: ReplyConfig {
                starts_in_reasoning: rendered
                    .opens_reasoning(&self.model.tokenizer.markup().reasoning),
                split_reasoning: true,
                ..ReplyConfig::default()
            },
            stop_tokens: Vec::new(),
            logprobs: false,
        });
        let id = JobId(self.next_job);
        self.next_job += 1;
        tracing::debug!(prompt_tokens = n_prompt, "answering");
        let begun = Instant::now();
        self.scheduler.submit(Job {
            id,
            params: self.settings(n_prompt)?,
            prompt: prompt.into(),
            choices: 1,
            priority: 0,
        })?;
        let mut answer = Answer {
            reply: Reply::default(),
            ended: None,
            prompt: (n_prompt, Duration::ZERO),
            generated: (0, Duration::ZERO),
        };
        let mut first: Option<Instant> = None;
        let mut hear = |answer: &mut Answer, parts: Vec<Part>| -> std::io::Result<()> {
            for part in parts {
                say(&part.piece)?;
                answer.reply.push(part.piece);
            }
            Ok(())
        };
        let mut events = Vec::new();
        let mut is_cut = false;
        loop {
            if !is_cut && cut() {
                is_cut = true;
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
                                answer.prompt.1 = now - begun;
                                answer.generated.0 += tokens.len() - 1;
                            }
                            Some(first) => {
                                answer.generated.0 += tokens.len();
                                answer.generated.1 = now - first;
                            }
                        }
                        let parts = choice.push(tokens);
                        hear(&mut answer, parts)?;
                    }
                    Event::Finished { reason, .. } => {
                        let (parts, reason) = choice.finish(reason);
                        hear(&mut answer, parts)?;
                        answer.ended = (!is_cut).then_some(reason);
                    }
                    Event::Failed { error } => bail!(error),
                    Event::Started { .. } | Event::Prefill { .. } | Event::PromptLogprobs(_) => {}
                }
            }
            if progress == Progress::Idle {
                return Ok(answer);
            }
        }
    }

    fn settings(&self, n_prompt: usize) -> anyhow::Result<decode::GenerationParams> {
        let info = self.scheduler.info();
        let room = sampling_params::remaining_context(n_prompt, info.limits.context)?;
        let fields = SamplingParams {
            temperature: self.wanted.temperature,
            seed: self.wanted.seed,
            ..SamplingParams::default()
        };
        let usual = self.model.defaults.max_tokens.unwrap_or(room);
        let most = self.wanted.max_tokens.unwrap_or(usual).min(room);
        Ok(sampling_params::generation_params(
            &fields,
            &self.model.defaults,
            most,
            info.vocab,
        )?)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::open;
    use crate::settings::GenerationDefaults;
    use chat::conversation::Role;
    use contract::{Backend, KvFormat, KvFormats, Limits, OpenPlan};

    pub(in crate::commands) fn answerer(wanted: Wanted) -> Answerer {
        let loaded = open::tiny();
        let model = open::text_side(&loaded, None, None, GenerationDefaults::default()).unwrap();
        let plan = OpenPlan {
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
                pool: None,
            },
        };
        let cpu = cpu::CpuBackend::new(cpu::CpuOptions {
            reference: false,
            threads: Some(1),
        });
        Answerer::new(
            cpu.open(plan, &mut |_| {}).unwrap(),
            model,
            wanted,
            Speculation::default(),
        )
    }

    fn hello() -> Vec<Message> {
        vec![Message::new(Role::User, "Hello")]
    }

    #[test]
    fn what_is_said_joined_is_the_answer_and_a_seed_repeats_it() {
        let wanted = Wanted {
            max_tokens: Some(12),
            seed: Some(3),
            ..Wanted::default()
        };
        let mut answerer = answerer(wanted);
        let mut said = Reply::default();
        let mut say = |piece: &ReplyDelta| {
            said.push(piece.clone());
            Ok(())
        };
        let first = answerer.answer(&hello(), &mut say, &|| false).unwrap();
        assert_eq!(first.ended, Some(FinishReason::Length));
        assert_eq!((first.generated.0, first.prompt.0 > 0), (11, true));
        assert_eq!(first.reply, said);
        let again = answerer
            .answer(&hello(), &mut |_| Ok(()), &|| false)
            .unwrap();
        assert_eq!(again.reply, first.reply);
    }

    #[test]
    fn an_answer_that_is_cut_ends_early_and_the_next_one_comes() {
        let mut answerer = answerer(Wanted {
            max_tokens: Some(100),
            // A random seed would now and then draw the end before the limit.
            seed: Some(3),
            ..Wanted::default()
        });
        let asked = std::cell::Cell::new(0);
        let cut = || {
            asked.set(asked.get() + 1);
            asked.get() > 5
        };
        let answer = answerer.answer(&hello(), &mut |_| Ok(()), &cut).unwrap();
        assert_eq!(answer.ended, None);
        assert!(answer.generated.0 < 10);
        let next = answerer
            .answer(&hello(), &mut |_| Ok(()), &|| false)
            .unwrap();
        assert_eq!(next.generated.0, 99);
    }

    #[test]
    fn a_conversation_that_outgrows_the_context_is_refused_with_both_numbers() {
        let mut answerer = answerer(Wanted::default());
        let long = vec![Message::new(Role::User, "word ".repeat(400))];
        let error = answerer
            .answer(&long, &mut |_| Ok(()), &|| false)
            .unwrap_err()
            .to_string();
        assert!(error.contains("256"), "{error}");
    }
}
