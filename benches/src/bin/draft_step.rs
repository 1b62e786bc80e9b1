//! CPU cost of a draft and of verifying a number of rows: the cost table of tree building.
//!
//! `draft_step TARGET DRAFT THREADS [REPEATS [ROWS,ROWS...]]` prints the best of the repeats in
//! milliseconds, for chains of these rows after 64 and 512 context tokens. 0 rows stand for a
//! draft.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use contract::{
    Backend, DraftItem, DraftLoad, DraftLoadConfig, KvFormat, KvFormats, Limits, LoadConfig,
    LogitsRequest, TokenId, Tree, VerifyItem,
};
use cpu::{CpuBackend, CpuOptions};

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [target, draft, threads, rest @ ..] = &args[..] else {
        anyhow::bail!("usage: draft_step TARGET DRAFT THREADS [REPEATS [ROWS,ROWS...]]");
    };
    let repeats: usize = rest.first().map_or(Ok(50), |n| n.parse())?;
    let sizes = rest
        .get(1)
        .map_or("0,1,2,3,4,6,8,12,16,24,32", String::as_str);
    let sizes: Vec<u32> = sizes.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let loaded = model::load(&PathBuf::from(target)).context("the target")?;
    let found = model::load_draft(
        &PathBuf::from(draft),
        &loaded.spec,
        model::DraftOptions::default(),
    )?;
    let config = LoadConfig {
        target: loaded.spec,
        weights: loaded.weights,
        draft: Some(DraftLoadConfig {
            spec: found.spec,
            weights: found.weights,
            kv: KvFormat::F16,
            load: DraftLoad::AtOpen,
        }),
        batch_invariant: false,
        kv: KvFormats {
            k: KvFormat::F16,
            v: KvFormat::F16,
        },
        limits: Limits {
            sequences: 1,
            context: 1024,
            tree_nodes: 64,
            prefill_chunk: 512,
            pool_tokens: None,
        },
    };
    let backend = CpuBackend::new(CpuOptions {
        reference: false,
        threads: Some(threads.parse()?),
    });
    let mut runner = backend.open(config, &mut |_| {})?;
    for context in [64, 512] {
        let seq = runner.open(800)?;
        let tokens: Vec<TokenId> = (0..context).map(|i| TokenId(100 + i % 50)).collect();
        let start = Instant::now();
        runner.prefill(seq, &tokens, &[])?;
        let prefill = start.elapsed().as_secs_f64() * 1e3;
        let best = |work: &mut dyn FnMut() -> anyhow::Result<()>| -> anyhow::Result<f64> {
            let mut best = f64::INFINITY;
            for _ in 0..repeats {
                let start = Instant::now();
                work()?;
                best = best.min(start.elapsed().as_secs_f64() * 1e3);
            }
            Ok(best)
        };
        let depth = runner.info().draft_depth.unwrap_or(1);
        let items = [DraftItem {
            seq,
            root: TokenId(7),
        }];
        writeln!(
            std::io::stdout(),
            "context {context}: prefill {prefill:.2} ms"
        )?;
        let mut one = 0.0;
        for &rows in &sizes {
            if rows == 0 {
                let ms = best(&mut || Ok(runner.draft(&items, depth, 8).map(|_| ())?))?;
                writeln!(std::io::stdout(), "  draft    {ms:7.3} ms")?;
                continue;
            }
            let tokens: Vec<TokenId> = (0..rows).map(|i| TokenId(200 + i)).collect();
            let tree = Tree::chain(&tokens)?;
            let requests = vec![LogitsRequest::top_k(1); rows as usize];
            let ms = best(&mut || {
                runner.verify(&[VerifyItem {
                    seq,
                    tree: &tree,
                    requests: &requests,
                }])?;
                Ok(runner.discard(seq)?)
            })?;
            one = if one == 0.0 { ms } else { one };
            writeln!(
                std::io::stdout(),
                "  {rows:3} rows {ms:7.3} ms  {:5.2} of the first",
                ms / one
            )?;
        }
        runner.close(seq);
    }
    Ok(())
}
