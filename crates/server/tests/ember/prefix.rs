//! Saved states on the bundled pair, bit for bit. Interleaved conversations continue from states in
//! memory, or from files after a restart. They give the tokens and probabilities of full prefill.

use std::sync::Arc;

use chat::{SpecialTokens, Tokenizer};
use contract::{Backend, KvFormat, TokenId};
use cpu::CpuBackend;
use decode::{
    Event, GenerationParams, Job, JobId, NextPrompt, OutputToken, PrefixConfig, PrefixStats,
    Sampling, SavePointConfig, Scheduler, SchedulerConfig, SchedulerState, SpeculationConfig,
    TreeInit,
};
use server::engine::store::{DiskStore, StoreConfig};

use crate::draft::config_with_draft;
use crate::golden::{FAST, ember};

const MAX_TOKENS: usize = 12;

fn scheduler(max_entries: usize, format: KvFormat, store: Option<DiskStore>) -> Scheduler {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let mut load_config = config_with_draft(None, FAST);
    load_config.kv.k = format;
    load_config.kv.v = format;
    load_config.limits.sequences = 4;
    load_config.limits.context = 2048;
    let config = SchedulerConfig {
        max_sequences: 2,
        eos: loaded.vocab.eos,
        speculation: SpeculationConfig {
            budget: 7,
            init: TreeInit::None,
            ..SpeculationConfig::default()
        },
        prefix: PrefixConfig {
            max_entries,
            save_points: SavePointConfig {
                turn_starts: vec![tokenizer.id_of("<|im_start|>").unwrap()],
                // Turns are short here.
                min_distance: 64,
                ..SavePointConfig::default()
            },
            min_store_tokens: 64,
            warmup_tokens: 1 << 20,
            ..PrefixConfig::default()
        },
        ..SchedulerConfig::default()
    };
    let runner = CpuBackend::new(FAST)
        .with_rotation()
        .open(load_config, &mut |_| {})
        .unwrap();
    let scheduler = Scheduler::new(runner, config);
    match store {
        Some(store) => scheduler.with_store(Box::new(store)),
        None => scheduler,
    }
}

/// Prompts of three interleaved conversations. As templates do, each next prompt contains the last
/// reply without its reasoning.
fn prompts(turns: usize) -> Vec<Vec<TokenId>> {
    let loaded = model::load(&ember("ember.gguf")).unwrap();
    let tokenizer = Tokenizer::new(&loaded.vocab).unwrap();
    let head =
        "<|im_start|>system\nYou count things, and you know at length which things they are. "
            .to_owned()
            + &"Lamps, coins, letters, apples, tickets, stones and birds are things. ".repeat(8)
            + "<|im_end|>\n";
    let mut conversations = vec![head; 3];
    let mut prompts = Vec::new();
    for turn in 0..turns {
        for (who, conversation) in conversations.iter_mut().enumerate() {
            let question = format!("How many stones has {who} after turn {turn}? ").repeat(6);
            conversation.push_str(&format!(
                "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ));
            let asked = format!("{conversation}<think>\n");
            prompts.push(tokenizer.encode(&asked, SpecialTokens::Parse).unwrap());
            conversation.push_str(&format!("There are {turn} stones, or {who}.<|im_end|>\n"));
        }
    }
    prompts
}

fn settings(i: usize) -> GenerationParams {
    let sampling = match i % 2 {
        0 => Sampling::greedy(),
        _ => Sampling {
            temperature: 0.9,
            seed: i as u64,
            ..Sampling::default()
        },
    };
    GenerationParams {
        sampling,
        max_tokens: MAX_TOKENS,
        logprobs: Some(3),
        ..GenerationParams::default()
    }
}

/// The replies to the prompts, two at a time; `first` is the index of the first prompt.
fn answers(
    scheduler: &mut Scheduler,
    prompts: &[Vec<TokenId>],
    first: usize,
) -> (Vec<Vec<OutputToken>>, PrefixStats) {
    let mut generated = vec![Vec::new(); prompts.len()];
    let mut events = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let job = Job {
            id: JobId(i as u64),
            prompt: Arc::from(&prompt[..]),
            choices: 1,
            params: settings(first + i),
            priority: 0,
        };
        scheduler.submit(job).unwrap();
        let wait = i % 2 == 1 || i + 1 == prompts.len();
        while wait && scheduler.step(&mut events).unwrap() == SchedulerState::Working {}
    }
    for (id, event) in events {
        match event {
            Event::Tokens { tokens, .. } => generated[id.0 as usize].extend(tokens),
            Event::Failed { error } => panic!("{id}: {error}"),
            _ => {}
        }
    }
    let stats = scheduler.stats();
    assert_eq!(stats.leaks, 0);
    (generated, stats.prefix)
}

fn check(format: KvFormat, turns: usize) {
    let prompts = prompts(turns);
    let (expected, cold) = answers(&mut scheduler(0, format, None), &prompts, 0);
    assert_eq!(cold.cached_tokens, 0);
    let all: usize = prompts.iter().map(Vec::len).sum();
    for max_entries in [16, 3] {
        let (found, stats) = answers(&mut scheduler(max_entries, format, None), &prompts, 0);
        assert!(
            found == expected,
            "{}, {max_entries} entries: {stats:?}",
            format.name()
        );
        assert_eq!(stats.failed, 0);
        let least = if max_entries == 16 { all / 3 } else { all / 6 };
        assert!(stats.cached_tokens as usize > least, "{stats:?} of {all}");
    }
    // The last turns run in a new process with the states that the old one left on disk.
    let dir = tempfile::tempdir().unwrap();
    let store = || {
        let config = StoreConfig {
            dir: dir.path().to_path_buf(),
            budget: 1 << 30,
            owner: [1; 16],
        };
        Some(DiskStore::open(config).unwrap())
    };
    let last = prompts.len() - 3;
    let mut before = scheduler(16, format, store());
    answers(&mut before, &prompts[..last], 0);
    before.flush().unwrap();
    drop(before);
    let mut after = scheduler(16, format, store());
    let (found, stats) = answers(&mut after, &prompts[last..], last);
    assert!(
        found == expected[last..],
        "{} after a restart",
        format.name()
    );
    assert!(stats.store_hits > 0 && stats.failed == 0, "{stats:?}");
}

/// Most of the next prompt of a conversation, once a prompt of [`prompts`] has its reply.
fn next_prompt(prompts: &[Vec<TokenId>], i: usize) -> Option<NextPrompt> {
    let next = prompts.get(i + 3)?;
    Some(NextPrompt {
        tokens: next[..next.len() - 9].into(),
        session: None,
    })
}

#[test]
fn prefill_in_any_chunks_is_bit_identical() {
    let prompts = prompts(3);
    let (expected, _) = answers(&mut scheduler(0, KvFormat::F16, None), &prompts, 0);
    for chunks in [1, 9] {
        let mut scheduler = scheduler(16, KvFormat::F16, None);
        let mut found = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let one = std::slice::from_ref(prompt);
            found.extend(answers(&mut scheduler, one, i).0);
            if let Some(text) = next_prompt(&prompts, i) {
                scheduler.queue_warmup(text);
            }
            for _ in 0..chunks {
                scheduler.warmup_step().unwrap();
            }
        }
        assert!(found == expected, "{chunks} chunks in each pause");
        let stats = scheduler.stats().prefix;
        assert!(stats.warmup_hits > 0 && stats.failed == 0, "{stats:?}");
    }
}

#[test]
fn interleaved_conversations_from_snapshots_match_full_prefill() {
    check(KvFormat::F16, 4);
}

#[test]
fn interleaved_conversations_match_with_quantized_kv() {
    check(KvFormat::Q4_0, 2);
}
