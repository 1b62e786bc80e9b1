//! The server of the overhead bench: the real HTTP side and engine thread with a sleeping device.
//!
//! Each device call takes 20 ms. Its token is the time of its return as text, in microseconds since
//! 1970 modulo 2^16. A client on the same machine can therefore compute each token's latency from
//! the text.
//!
//! Prints its address, then serves until it is killed or its standard input closes.

#![expect(
    clippy::print_stdout,
    reason = "the address goes to the process that started this one"
)]

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use chat::Tokenizer;
use chat::template::ChatTemplate;
use conformance::fake::{FakeRunner, FakeSpec, Language};
use contract::{
    DeviceError, KvPool, Limits, LogitsRequest, LogitsRow, LogitsSelection, Runner, SeqId, TokenId,
    TokenKind, VerifyItem, Vocab,
};
use decode::SchedulerConfig;
use server::engine::{EngineFactory, Loaded};
use server::http::shutdown::ShutdownSignal;
use server::settings::{GenerationDefaults, ServerConfig};
use server::text::constraints::ModelConstraints;
use server::text::model_context::{ModelContext, ModelDescription};

/// Duration of a device call.
const STEP: Duration = Duration::from_millis(20);
const BYTES: usize = 256;
const STAMPS: usize = 1 << 16;
const VOCAB: usize = BYTES + STAMPS + 1;
const END: TokenId = TokenId((VOCAB - 1) as u32);

const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";

struct StampRunner {
    /// Tracks sequences and positions. Its rows are not used.
    books: FakeRunner,
}

impl StampRunner {
    fn new() -> StampRunner {
        let limits = Limits {
            sequences: 64,
            context: 8192,
            tree_nodes: 1,
            prefill_chunk: 512,
            pool_tokens: None,
        };
        let language = Language {
            vocab: VOCAB,
            spread: 1.0,
            ending: None,
            salt: 0,
        };
        StampRunner {
            books: FakeRunner::new(FakeSpec {
                language,
                limits,
                pool_tokens: KvPool::for_limits(limits, 1).tokens(),
                ..FakeSpec::default()
            }),
        }
    }
}

/// A row in which `best` clearly wins.
fn row(best: TokenId, ask: &LogitsRequest) -> LogitsRow {
    let ids: Vec<TokenId> = match ask.selection {
        LogitsSelection::None => return LogitsRow::default(),
        LogitsSelection::Full => (0..VOCAB as u32).map(TokenId).collect(),
        LogitsSelection::TopK(k) => {
            let others = (0..VOCAB as u32).map(TokenId).filter(|id| *id != best);
            std::iter::once(best).chain(others).take(k).collect()
        }
    };
    let logits: Vec<f32> = ids
        .iter()
        .map(|id| if *id == best { 0.0 } else { -1000.0 })
        .collect();
    LogitsRow {
        raw: logits.clone(),
        logits,
        ids,
        lse: 0.0,
        raw_lse: 0.0,
        mass: 0.0,
    }
}

/// The token that encodes the return time.
fn stamp() -> TokenId {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros());
    TokenId((BYTES as u128 + now % STAMPS as u128) as u32)
}

fn sleep_until(begun: Instant) {
    std::thread::sleep((begun + STEP).saturating_duration_since(Instant::now()));
}

impl Runner for StampRunner {
    contract::forward_runner!(self => self.books; info, capacity, open, close, draft, commit,
        discard, snapshot, restore, free_snapshot, export, import);

    fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        requests: &[(usize, LogitsRequest)],
    ) -> Result<Vec<LogitsRow>, DeviceError> {
        let begun = Instant::now();
        self.books.prefill(seq, tokens, &[])?;
        sleep_until(begun);
        let best = stamp();
        Ok(requests.iter().map(|(_, ask)| row(best, ask)).collect())
    }

    fn verify(&mut self, items: &[VerifyItem<'_>]) -> Result<Vec<Vec<LogitsRow>>, DeviceError> {
        let begun = Instant::now();
        let silent = [LogitsRequest::NONE];
        let unasked: Vec<VerifyItem<'_>> = items
            .iter()
            .map(|item| VerifyItem {
                requests: &silent,
                ..*item
            })
            .collect();
        self.books.verify(&unasked)?;
        sleep_until(begun);
        let best = stamp();
        let rows = items
            .iter()
            .map(|item| item.requests.iter().map(|ask| row(best, ask)).collect());
        Ok(rows.collect())
    }
}

/// A token per byte, one per stamp, and an end token that never occurs.
fn vocab() -> Vocab {
    let mut tokens = Vec::with_capacity(VOCAB);
    let mut beyond = 256;
    for byte in 0..=255_u8 {
        let letter = match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
            _ => {
                beyond += 1;
                char::from_u32(beyond - 1).unwrap_or('\u{fffd}')
            }
        };
        tokens.push(letter.to_string());
    }
    tokens.extend((0..STAMPS).map(|stamp| format!("{stamp:05};")));
    tokens.push("<|end|>".to_owned());
    let mut kinds = vec![TokenKind::Normal; VOCAB];
    kinds[END.index()] = TokenKind::Control;
    Vocab {
        tokens,
        kinds,
        eos: vec![END],
        eos_token: Some(END),
        chat_template: Some(TEMPLATE.to_owned()),
        ..Vocab::default()
    }
}

fn main() -> anyhow::Result<()> {
    let factory: EngineFactory = Box::new(|_| {
        let vocab = vocab();
        let tokenizer = Arc::new(Tokenizer::new(&vocab)?);
        let defaults = GenerationDefaults::default();
        Ok(Loaded {
            runner: Box::new(StampRunner::new()),
            scheduler: SchedulerConfig {
                max_sequences: 64,
                eos: vocab.eos.clone(),
                ..SchedulerConfig::default()
            },
            model: ModelContext {
                constraints: ModelConstraints::new(
                    &tokenizer,
                    &vocab.eos,
                    vocab.tokens.len(),
                    &defaults.reasoning,
                ),
                tokenizer,
                template: ChatTemplate::from_vocab(&vocab)?,
                eos: vocab.eos.clone(),
                defaults,
                compressor: None,
                description: ModelDescription::default(),
            },
            store: None,
        })
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        let (switch, stop) = ShutdownSignal::new();
        std::thread::spawn(move || {
            // Exits with the client.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            switch.trigger();
            switch.trigger();
        });
        match server::serve(ServerConfig::default(), factory, listener, stop).await {
            Ok(()) | Err(server::error::ServeError::Forced) => Ok(()),
            Err(error) => Err(error.into()),
        }
    })
}
