//! ServerProcess overhead: starts `overhead_server` as a process and sends it requests.
//!
//! - `first_byte`: from just before the request is written to the first byte of the stream, on an
//!   open connection. The engine is not involved: headers and the first chunk are sent on
//!   admission.
//! - `first_token` and `token_event`: from the time the device returned a token until this process
//!   has parsed its event. The device writes that time into the token's text.
//!
//! Run as `cargo build --release -p benches && target/release/overhead`. It writes JSON lines to
//! standard output.

#![expect(clippy::print_stdout, reason = "the figures go to standard output")]

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const STAMPS: u64 = 1 << 16;
/// Tokens per reply.
const TOKENS: usize = 100;

/// Kills the server when the client ends.
struct ServerProcess(Child);

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Latencies of one reply in milliseconds.
#[derive(Default)]
struct Sample {
    first_byte: Vec<f64>,
    first_token: Vec<f64>,
    token_event: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let program = std::env::current_exe()?.with_file_name("overhead_server");
    let child = Command::new(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} is not built", program.display()))?;
    let mut server = ServerProcess(child);
    let stdout = server.0.stdout.take().context("the server has no output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    let address: SocketAddr = line.trim().parse().context("the server's address")?;
    // One thread, so that the client takes at most one core from the server.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        wait_until_ready(address).await?;
        run(address, 1, 2).await?;
        for (streams, rounds) in [(1, 10), (32, 5)] {
            let sample = run(address, streams, rounds).await?;
            report("first_byte", streams, sample.first_byte);
            report("first_token", streams, sample.first_token);
            report("token_event", streams, sample.token_event);
        }
        Ok(())
    })
}

async fn wait_until_ready(address: SocketAddr) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        let mut socket = TcpStream::connect(address).await?;
        let request = b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n";
        socket.write_all(request).await?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await?;
        if answer.starts_with("HTTP/1.1 200") {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bail!("the server did not become ready")
}

async fn run(address: SocketAddr, streams: usize, rounds: usize) -> anyhow::Result<Sample> {
    let mut all = Sample::default();
    for _ in 0..rounds {
        let mut replies = Vec::new();
        for i in 0..streams {
            // Start times spread over one step, as for independent clients.
            let begin = Duration::from_micros(20_000 * i as u64 / streams as u64);
            replies.push(tokio::spawn(reply(address, begin)));
        }
        for reply in replies {
            let sample = reply.await??;
            all.first_byte.extend(sample.first_byte);
            all.first_token.extend(sample.first_token);
            all.token_event.extend(sample.token_event);
        }
    }
    Ok(all)
}

/// One streamed reply on its own connection.
async fn reply(address: SocketAddr, begin: Duration) -> anyhow::Result<Sample> {
    let mut socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let body = json!({
        "messages": [{"role": "user", "content": "what time is it"}],
        "stream": true,
        "temperature": 0,
        "max_tokens": TOKENS,
    })
    .to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::time::sleep(begin).await;
    let mut sample = Sample::default();
    let sent = Instant::now();
    socket.write_all(request.as_bytes()).await?;
    let mut received = Vec::with_capacity(64 << 10);
    let mut parsed = 0;
    let mut tokens = 0;
    loop {
        let count = socket.read_buf(&mut received).await?;
        if count == 0 {
            break;
        }
        if sample.first_byte.is_empty() {
            sample.first_byte.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        while let Some(end) = received[parsed..].windows(2).position(|w| w == b"\n\n") {
            let event = &received[parsed..parsed + end];
            parsed += end + 2;
            for stamp in stamps(event)? {
                let late = lateness(stamp);
                match tokens {
                    0 => sample.first_token.push(late),
                    _ => sample.token_event.push(late),
                }
                tokens += 1;
            }
        }
    }
    if tokens != TOKENS {
        let head = String::from_utf8_lossy(&received[..received.len().min(300)]).into_owned();
        bail!("{tokens} tokens instead of {TOKENS}: {head}");
    }
    Ok(sample)
}

/// The time stamps in one event: the digits of its content.
fn stamps(event: &[u8]) -> anyhow::Result<Vec<u64>> {
    let Some(at) = event.windows(6).position(|w| w == b"data: ") else {
        return Ok(Vec::new());
    };
    let data = &event[at + 6..];
    if data == b"[DONE]" {
        return Ok(Vec::new());
    }
    let chunk: serde_json::Value = serde_json::from_slice(data)?;
    let content = chunk["choices"][0]["delta"]["content"].as_str();
    let mut found = Vec::new();
    for text in content.unwrap_or("").split_terminator(';') {
        found.push(text.parse()?);
    }
    Ok(found)
}

/// Milliseconds since a stamp, which holds its time modulo 65.5 ms.
fn lateness(stamp: u64) -> f64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros());
    let now = (now % u128::from(STAMPS)) as u64;
    ((now + STAMPS - stamp) % STAMPS) as f64 / 1e3
}

/// Rounds to microseconds, the resolution of the stamps.
fn round(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// The processor's name on Linux.
fn machine() -> Option<String> {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = cpus.lines().find(|line| line.starts_with("model name"))?;
    let name = line.split_once(':')?.1.trim();
    let cores = std::thread::available_parallelism().ok()?;
    Some(format!("{name}, {cores} threads"))
}

fn commit() -> Option<String> {
    let head = Command::new("git")
        .args(["rev-parse", "--short", "HEAD"])
        .output()
        .ok()?;
    let text = String::from_utf8(head.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Other load: the one-minute load average.
fn load() -> Option<f64> {
    let loads = std::fs::read_to_string("/proc/loadavg").ok()?;
    loads.split_whitespace().next()?.parse().ok()
}

fn report(metric: &str, streams: usize, mut ms: Vec<f64>) {
    ms.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = ((ms.len() - 1) as f64 * share).round() as usize;
        ms.get(index).copied().unwrap_or(f64::NAN)
    };
    let line = json!({
        "bench": "server_overhead",
        "metric": metric,
        "streams": streams,
        "step_ms": 20,
        "n": ms.len(),
        "median_ms": round(at(0.5)),
        "p95_ms": round(at(0.95)),
        "max_ms": round(at(1.0)),
        "machine": machine(),
        "load_1min": load(),
        "commit": commit(),
        "command": "cargo build --release -p benches && target/release/overhead",
    });
    println!("{line}");
}
