//! Prompt compression end to end: the bundled model scores its own prompts on the CPU.

use serde_json::{Value, json};

use crate::client::{Response, ServerProcess, request};
use crate::process::{good, hearth, model};

const QUESTION: &str = "What is the code of the blue door?";
const FACT: &str = "The code of the blue door is 7316.";

/// A page of filler with the fact in its middle.
fn page(sentences: usize) -> String {
    let filler =
        |i: usize| format!("Sentence number {i} is about rain, of hills and of old roads. ");
    let half = sentences / 2;
    let (before, after) = (0..half, half..sentences);
    let text = |range: std::ops::Range<usize>| range.map(filler).collect::<String>();
    format!("{}{FACT} {}", text(before), text(after))
}

fn ask(server: &ServerProcess, body: Value) -> Response {
    let mut all = json!({"max_tokens": 4, "temperature": 0});
    all.as_object_mut()
        .unwrap()
        .extend(body.as_object().unwrap().clone());
    server.request("/v1/chat/completions", &all.to_string())
}

fn messages(page: &str) -> Value {
    json!([
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": page},
        {"role": "user", "content": QUESTION},
    ])
}

#[test]
fn long_contents_are_shortened_and_the_reply_says_so() {
    let server = ServerProcess::start(&[
        "--prefill-compression",
        "always",
        "--prefill-keep-ratio",
        "0.1",
        "--prefill-skip-park",
        "--log-prompts",
    ]);
    assert!(
        server.log.contains("prompts are scored by"),
        "{}",
        server.log
    );
    assert!(
        server.log.contains("--prefill-skip-park has no effect"),
        "{}",
        server.log
    );
    let page = page(120);
    let first = ask(&server, json!({"messages": messages(&page)}));
    assert_eq!(first.status, 200, "{}", first.body);
    let (first, timings) = (first.json(), first.json()["timings"].clone());
    assert_eq!(timings["compression_reason"], "compressed", "{timings}");
    let count = |timings: &Value, name: &str| timings[name].as_u64().unwrap();
    let (from, to) = (
        count(&timings, "compressed_from_tokens"),
        count(&timings, "compressed_tokens"),
    );
    assert!(to < from / 5, "{timings}");
    assert!(
        timings["compression_ms"].as_f64().unwrap() > 0.0,
        "{timings}"
    );
    // The usage counts what was sent, the timings what was computed.
    assert_eq!(first["usage"]["prompt_tokens"], from);
    assert_eq!(count(&timings, "prompt_n") + count(&timings, "cache_n"), to);

    // An equal request is not scored again, and its compressed prompt is cached.
    let again = ask(&server, json!({"messages": messages(&page)})).json();
    let timings = &again["timings"];
    assert_eq!(
        timings["compression_reason"],
        "compressed with the scores of an earlier request"
    );
    assert_eq!(count(timings, "compressed_tokens"), to);
    assert!(count(timings, "cache_n") + 64 >= to, "{timings}");
    assert_eq!(again["choices"], first["choices"]);

    // A request can turn it off, and a wrong mode is refused.
    let off = json!({"messages": messages(&page), "prefill_compression": "off"});
    let timings = ask(&server, off).json()["timings"].clone();
    assert_eq!(timings["compression_reason"], "off");
    assert_eq!(timings["compressed_tokens"], from);
    let wrong = ask(
        &server,
        json!({"messages": messages(&page), "prefill_compression": "on"}),
    );
    assert_eq!(wrong.status, 400);
    assert!(wrong.body.contains("off, auto or always"), "{}", wrong.body);

    streams_show_scoring(&server);
    slots_show_scoring(&server, &page);

    let props = server.request("/props", "").json()["pflash"].clone();
    assert_eq!(props["mode"], "always", "{props}");
    assert_eq!(
        (&props["enabled"], &props["scores_itself"]),
        (&json!(true), &json!(true))
    );
    let scoring = server.request("/slots/summary", "").json()["scoring"].clone();
    assert_eq!(scoring, json!({"prompts": 0, "done": 0, "total": 0}));
}

/// Streams begin while their prompt is scored, with a comment; then come the reply's events.
fn streams_show_scoring(server: &ServerProcess) {
    let cases = [
        ("/v1/chat/completions", "messages", "data: {", "chunk"),
        ("/v1/messages", "messages", "event: ping\n", "message_start"),
        ("/v1/responses", "input", "event: ", "response.created"),
    ];
    for (at, (path, field, next, opening)) in cases.into_iter().enumerate() {
        let content = format!("Text {at}. {}{QUESTION}", page(40));
        let messages = json!([{"role": "user", "content": content}]);
        let body = json!({field: messages, "max_tokens": 16, "temperature": 0, "stream": true});
        let reply = server.request(path, &body.to_string());
        assert_eq!(reply.status, 200, "{}", reply.body);
        let mut parts = reply.body.split("\n\n");
        let comment = parts.next().unwrap();
        let known = [
            ": waiting for the scorer",
            ": scoring the prompt for compression, ",
        ];
        assert!(
            known.iter().any(|text| comment.starts_with(text)),
            "{comment}"
        );
        let event = parts.find(|part| !part.starts_with(':')).unwrap();
        assert!(event.starts_with(next), "{path}: {event}");
        let rest = &reply.body;
        assert!(rest.contains(opening), "{path}: {rest}");
        let says = "\"compression_reason\":\"compressed\"";
        assert!(rest.contains(says), "{path}: {rest}");
    }
}

/// While a prompt is scored, a free slot shows how far that is.
fn slots_show_scoring(server: &ServerProcess, page: &str) {
    let address = server.address.clone();
    let body = json!({"messages": messages(&format!("Once more. {page}")), "max_tokens": 1});
    let path = "/v1/chat/completions";
    let asking = std::thread::spawn(move || request(&address, path, &body.to_string(), &[]));
    let scoring = loop {
        assert!(!asking.is_finished(), "no slot showed the scoring");
        let slots = server.request("/slots", "").json();
        let slots = slots.as_array().unwrap();
        let shown = slots.iter().find_map(|slot| slot.get("scoring"));
        if let Some(shown) = shown.filter(|shown| shown["total"] != 0) {
            break shown.clone();
        }
    };
    let count = |name: &str| scoring[name].as_u64().unwrap();
    assert!(count("tokens") > 1000, "{scoring}");
    assert!(count("done") <= count("total"), "{scoring}");
    assert_eq!(count("total") % count("tokens"), 0, "{scoring}");
    assert_eq!(asking.join().unwrap().status, 200);
}

#[test]
fn system_prompt_question_and_the_sentence_asked_for_survive() {
    let server = ServerProcess::start(&[
        "--prefill-compression",
        "auto",
        "--prefill-threshold",
        "400",
        "--prefill-keep-ratio",
        "0.1",
    ]);
    let body = |prefix: &str| {
        json!({"messages": messages(&format!("{prefix}{}", page(120))), "max_tokens": 1,
            "return_token_ids": true})
    };
    let reply = ask(&server, body("")).json();
    let ids = reply["prompt_token_ids"].clone();
    let text = server.request("/detokenize", &json!({"tokens": ids}).to_string());
    let text = text.json()["content"].as_str().unwrap().to_owned();
    for part in ["Answer briefly.", QUESTION, FACT, "<|im_start|>assistant"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let kept = text.matches("Sentence number").count();
    assert!(
        (1..=20).contains(&kept),
        "{kept} of 120 sentences in {text}"
    );
    // What auto leaves whole, with the reason.
    let reason = |body: Value| {
        let timings = ask(&server, body).json()["timings"].clone();
        assert_eq!(
            timings["compressed_from_tokens"],
            timings["compressed_tokens"]
        );
        timings["compression_reason"].as_str().unwrap().to_owned()
    };
    let short = json!({"messages": [{"role": "user", "content": "Hello"}]});
    assert!(reason(short).contains("below the threshold of 400"));
    raw_prompts_are_compressed_before_their_end(&server);
    // Without --prefill-aged, earlier messages stay whole.
    let mut continued = messages(&page(60));
    continued[1]["role"] = "assistant".into();
    assert_eq!(
        reason(json!({"messages": continued})),
        "a continued conversation"
    );
}

/// Text completions in both protocols; what must stay as sent does, with the reason.
fn raw_prompts_are_compressed_before_their_end(server: &ServerProcess) {
    let prompt = format!("{}{QUESTION}\nAnswer:", page(120));
    let complete = |path: &str, fields: Value| {
        let mut body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0});
        let fields = fields.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
        let reply = server.request(path, &body.to_string());
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let reply = complete("/v1/completions", json!({"return_token_ids": true}));
    let timings = &reply["timings"];
    assert_eq!(timings["compression_reason"], "compressed", "{timings}");
    let count = |name: &str| timings[name].as_u64().unwrap();
    let (from, to) = (count("compressed_from_tokens"), count("compressed_tokens"));
    assert!(2 * to < from, "{timings}");
    assert_eq!(reply["usage"]["prompt_tokens"], from);
    let ids = reply["choices"][0]["prompt_token_ids"].clone();
    let text = server.request("/detokenize", &json!({"tokens": ids}).to_string());
    let text = text.json()["content"].as_str().unwrap().to_owned();
    assert!(text.contains(FACT), "{text}");
    // The end is that of the prompt.
    assert!(text.ends_with(&prompt[prompt.len() - 1000..]), "{text}");

    let again = complete("/completion", json!({}))["timings"].clone();
    let reason = "compressed with the scores of an earlier request";
    assert_eq!(again["compression_reason"], reason, "{again}");
    let whole = [
        (json!({"echo": true}), "the request needs the exact prompt"),
        (json!({"prefill_compression": "off"}), "off"),
        (json!({"prompt": [5, 6, 7]}), "the prompt is token ids"),
    ];
    for (fields, reason) in whole {
        let timings = complete("/v1/completions", fields)["timings"].clone();
        assert_eq!(timings["compression_reason"], reason, "{timings}");
    }
}

#[test]
fn a_prompt_beyond_the_context_is_served_if_its_compressed_form_fits() {
    let server = ServerProcess::start(&[
        "--max-ctx",
        "512",
        "--prefill-compression",
        "always",
        "--prefill-keep-ratio",
        "0.1",
    ]);
    let long = messages(&page(120));
    let reply = ask(&server, json!({"messages": long}));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let timings = reply.json()["timings"].clone();
    assert!(
        timings["compressed_from_tokens"].as_u64().unwrap() > 512,
        "{timings}"
    );
    let off = ask(
        &server,
        json!({"messages": long, "prefill_compression": "off"}),
    );
    assert_eq!(off.status, 400, "{}", off.body);
    let still_too_long = ask(&server, json!({"messages": messages(&page(400))}));
    assert_eq!(still_too_long.status, 400, "{}", still_too_long.body);
    // A stream has begun by then.
    let streamed = json!({"messages": messages(&page(400)), "stream": true});
    let streamed = ask(&server, streamed);
    assert_eq!(streamed.status, 200, "{}", streamed.body);
    let error = streamed
        .body
        .split("\n\n")
        .find(|part| part.starts_with("data: "));
    assert!(
        error.unwrap().starts_with("data: {\"error\":{"),
        "{}",
        streamed.body
    );
    assert!(
        streamed.body.ends_with("data: [DONE]\n\n"),
        "{}",
        streamed.body
    );
}

#[test]
fn a_scorer_of_another_vocabulary_maps_its_scores_by_bytes() {
    let scorer = model();
    let server = ServerProcess::start(&[
        "--prefill-compression",
        "always",
        "--prefill-keep-ratio",
        "0.2",
        "--prefill-drafter",
        scorer.to_str().unwrap(),
    ]);
    let reply = ask(&server, json!({"messages": messages(&page(80))})).json();
    let timings = &reply["timings"];
    assert_eq!(timings["compression_reason"], "compressed", "{timings}");
    let props = server.request("/props", "").json()["pflash"].clone();
    assert_eq!(props["scores_itself"], false, "{props}");
    // Paths are shown with API keys only.
    assert_eq!(props["drafter_gguf"], Value::Null);
}

/// Waits until prefix warm-up has saved a state.
fn wait_for_warmup(server: &ServerProcess) {
    for _ in 0..1200 {
        let props = server.request("/props", "").json();
        if props["prefix_cache"]["prefix_warmup"]["saved"].as_u64() > Some(0) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("no prefix warm-up in 60 s");
}

#[test]
fn aged_messages_are_compressed_alike_in_every_later_turn_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    // Whether a draft is fast enough is measured at each start, and states depend on it.
    let args = [
        "--no-speculation",
        "--prefill-compression",
        "always",
        "--disk-prefix-cache-compress",
        "--prefill-keep-ratio",
        "0.7",
        "--kv-cache-dir",
        dir.path().to_str().unwrap(),
    ];
    let server = ServerProcess::start(&args);
    let mut all = vec![
        json!({"role": "system", "content": "Answer briefly."}),
        json!({"role": "user", "content": format!("{}{QUESTION}", page(120))}),
    ];
    let ask = |server: &ServerProcess, all: &[Value]| {
        let reply = ask(server, json!({"messages": all, "return_token_ids": true}));
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let count = |reply: &Value, name: &str| reply["timings"][name].as_u64().unwrap();
    let first = ask(&server, &all);
    assert_eq!(
        first["timings"]["compression_reason"],
        "the first turn stays whole, and later turns compress it"
    );
    let follow = |all: &mut Vec<Value>, reply: &Value, question: &str| {
        let said = reply["choices"][0]["message"]["content"].clone();
        all.push(json!({"role": "assistant", "content": said}));
        all.push(json!({"role": "user", "content": question}));
    };
    let check = |reply: &Value| {
        let scored_before = "earlier messages compressed with the scores of an earlier turn";
        assert_eq!(reply["timings"]["compression_reason"], scored_before);
        let (before, after) = (
            count(reply, "compressed_from_tokens"),
            count(reply, "compressed_tokens"),
        );
        // States end at multiples of 64 tokens, so a short prompt would miss the mark.
        assert!(
            after < 3 * before / 4 && after > 1600,
            "{}",
            reply["timings"]
        );
        let cached = count(reply, "cache_n") as f64 / after as f64;
        assert!(cached >= 0.95, "{}", reply["timings"]);
    };
    // Prefix warm-up renders the next prompt as it will be.
    wait_for_warmup(&server);
    follow(&mut all, &first, "And why?");
    let second = ask(&server, &all);
    check(&second);
    server.signal("TERM");
    server.wait();

    // The raw text finds what was kept, and the compressed prompt its state.
    let server = ServerProcess::start(&args);
    follow(&mut all, &second, "Is that all?");
    let third = ask(&server, &all);
    check(&third);
    // The second prompt up to the header of its reply begins the third one byte for byte.
    let ids = |reply: &Value| reply["prompt_token_ids"].as_array().unwrap().clone();
    let (second, third) = (ids(&second), ids(&third));
    let common = second.iter().zip(&third).take_while(|(a, b)| a == b);
    assert!(common.count() + 16 > second.len());
}

#[test]
fn bench_score_times_scoring_and_the_first_token_behind_it() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("score.jsonl");
    let flags = "--device cpu --tokens 700,1400 --reps 1 --json {}";
    good(&format!("bench score {{}} {flags}"), &[&model(), &json]);
    let target = "--target tiny-hybrid:q8_0 --keep 0.2";
    good(
        &format!("bench score {{}} {target} {flags}"),
        &[&model(), &json],
    );
    let lines = std::fs::read_to_string(&json).unwrap();
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |case: &str| {
        let found = lines.iter().filter(|line| line["case"] == case);
        let fields = found.map(|line| (line["tokens"].as_f64(), line["ms"].as_f64()));
        fields
            .map(|(tokens, ms)| (tokens.unwrap(), ms.unwrap()))
            .collect::<Vec<_>>()
    };
    let tokens: Vec<f64> = of("score").iter().map(|line| line.0).collect();
    assert_eq!(tokens, [700.0, 1400.0]);
    let (first, kept) = (of("first token"), of("prefill what stays"));
    assert!((560.0..=760.0).contains(&first[0].0), "{first:?}");
    assert!(kept[1].0 < 0.4 * first[1].0, "{kept:?} of {first:?}");
    for stage in ["tokenize", "score and select", "compress"] {
        assert!(of(stage)[1].1 < first[1].1, "{stage} of {first:?}");
    }
}

#[test]
fn wrong_settings_are_refused_before_the_port_is_open() {
    let done = hearth(&[
        "serve",
        "--prefill-compression",
        "auto",
        "--prefill-drafter",
        "no.gguf",
    ]);
    assert_eq!(done.code, Some(1));
    assert!(done.err.contains("--prefill-drafter"), "{}", done.err);
    let done = hearth(&["serve", "--prefill-curve", "10:7"]);
    assert_eq!(done.code, Some(1));
    assert!(
        done.err.contains("--prefill-curve 10:7: the ratio 7"),
        "{}",
        done.err
    );
    let done = hearth(&["serve", "--prefill-keep-ratio", "2"]);
    assert_eq!(done.code, Some(2));
}
