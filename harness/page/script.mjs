// Tests the scripts of the chat page and the status page in jsdom, with a server made of functions: new chats,
// errors, stops, focus, keys and the fields of a request. `run.mjs` tests the page in a browser.
//
//   python3 harness/clients/install.py dom        (jsdom, pinned)
//   node --test harness/page/script.mjs

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const { JSDOM } = createRequire(join(root, "target/harness/dom/package.json"))("jsdom");
const pages = join(root, "crates/server/src/http/page");

const json = (status, body) => new Response(JSON.stringify(body), { status });
const MODELS = json.bind(null, 200, { data: [{ id: "tiny", context_length: 4096 }] });

/** A reply that the test writes event by event; it fails like `fetch` when the request is aborted. */
function stream(signal) {
  let sink;
  const body = new ReadableStream({ start: (controller) => (sink = controller) });
  signal?.addEventListener("abort", () => {
    sink.error(Object.assign(new Error("aborted"), { name: "AbortError" }));
  });
  const write = (text) => sink.enqueue(new TextEncoder().encode(text));
  const delta = (delta, finish_reason = null) => write(`data: ${JSON.stringify({ choices: [{ delta, finish_reason }] })}\n\n`);
  return {
    response: new Response(body),
    say: (content) => delta({ content }),
    fail: (message) => write(`data: ${JSON.stringify({ error: { message } })}\n\n`),
    cut: () => sink.close(),
    end() {
      delta({}, "stop");
      write("data: [DONE]\n\n");
    },
  };
}

/** Opens a page; `answer` gets each request that is not for the models. */
async function open(file, answer, { hash = "", needsKey = false } = {}) {
  const calls = [];
  const dom = new JSDOM(readFileSync(join(pages, file), "utf8"), {
    url: `http://127.0.0.1:8000/${file === "status.html" ? "status" : ""}${hash}`,
    runScripts: "dangerously",
    pretendToBeVisual: true,
    beforeParse(window) {
      window.TextDecoderStream = TextDecoderStream;
      window.fetch = async (path, init = {}) => {
        const key = init.headers?.authorization;
        calls.push({ path, key, body: init.body && JSON.parse(init.body) });
        if (needsKey && key !== "Bearer right") return json(401, { error: { message: "needs an API key" } });
        return path === "v1/models" ? MODELS() : answer(init.signal, calls.length);
      };
    },
  });
  const at = (id) => dom.window.document.getElementById(id);
  const submit = (form) => form.dispatchEvent(new dom.window.Event("submit", { cancelable: true }));
  const page = {
    at,
    calls,
    document: dom.window.document,
    window: dom.window,
    log: () => at("log").textContent,
    asked: () => calls.filter((call) => call.path === "v1/chat/completions").map((call) => call.body),
    send(text) {
      at("text").value = text;
      submit(at("ask"));
    },
    submit,
  };
  await settled();
  return page;
}

/** Waits until promises and streams have nothing left to do. */
async function settled() {
  for (let turns = 0; turns < 20; turns++) await new Promise((later) => setImmediate(later));
}

const roles = (body) => body.messages.map((message) => `${message.role}: ${message.content}`);

test("a new chat gets nothing of an answer that was running", async () => {
  const streams = [];
  const page = await open("index.html", (signal) => (streams.push(stream(signal)), streams.at(-1).response));
  page.send("first");
  await settled();
  streams[0].say("old text");
  await settled();
  assert.match(page.log(), /old text/);
  page.at("clear").click();
  page.send("second");
  await settled();
  assert.doesNotMatch(page.log(), /old text|stopped|first/);
  assert.deepEqual(roles(page.asked()[1]), ["user: second"]);
  assert.equal(page.at("stop").hidden, false, "the second answer can be stopped");
  streams[1].say("new text");
  streams[1].end();
  await settled();
  page.send("third");
  await settled();
  assert.deepEqual(roles(page.asked()[2]), ["user: second", "assistant: new text", "user: third"]);
});

test("messages after an error work, and the typed text is not lost", async () => {
  const answers = [
    () => json(400, { error: { message: "too long" } }),
    () => new Response("<html>bad gateway</html>", { status: 502 }),
    () => {
      throw new TypeError("connection refused");
    },
  ];
  let good;
  const page = await open("index.html", (signal) => (answers.shift() ?? (() => (good = stream(signal)).response))());
  for (const message of ["too long", "the server answered 502", "connection refused"]) {
    page.send("my question");
    await settled();
    assert.match(page.log(), new RegExp(message));
    assert.equal(page.at("text").value, "my question");
    assert.equal(page.at("send").hidden, false);
  }
  page.send("my question");
  await settled();
  assert.deepEqual(roles(page.asked().at(-1)), ["user: my question"]);
  assert.equal(page.at("text").value, "");
  good.say("answer");
  good.end();
  await settled();
  page.send("more");
  await settled();
  assert.deepEqual(roles(page.asked().at(-1)), ["user: my question", "assistant: answer", "user: more"]);
});

test("an error within a stream is shown, and what came before it stays", async () => {
  const streams = [];
  const page = await open("index.html", (signal) => (streams.push(stream(signal)), streams.at(-1).response));
  page.send("a");
  await settled();
  streams[0].say("half");
  streams[0].fail("the device is gone");
  await settled();
  assert.match(page.log(), /half.*the device is gone/);
  page.send("b");
  await settled();
  assert.deepEqual(roles(page.asked()[1]), ["user: a", "assistant: half", "user: b"]);
  streams[1].cut();
  await settled();
  assert.match(page.log(), /the connection ended before the answer/);
  assert.equal(page.at("text").value, "b");
});

test("text that is typed meanwhile is not replaced by a failed question", async () => {
  let failed;
  const page = await open("index.html", () => new Promise((done) => (failed = () => done(json(500, {})))));
  page.send("question");
  await settled();
  page.at("text").value = "typed meanwhile";
  failed();
  await settled();
  assert.equal(page.at("text").value, "typed meanwhile");
});

test("the server's thinking default holds unless the user chooses", async () => {
  const page = await open("index.html", (signal) => {
    const reply = stream(signal);
    reply.say("x");
    reply.end();
    return reply.response;
  });
  for (const [choice, sent] of [["", undefined], ["on", true], ["off", false]]) {
    page.at("think").value = choice;
    page.send("hello");
    await settled();
    assert.equal(page.asked().at(-1).enable_thinking, sent);
    assert.equal("enable_thinking" in page.asked().at(-1), choice !== "");
  }
});

test("stop ends the answer and moves the focus to the text", async () => {
  let reply;
  const page = await open("index.html", (signal) => (reply = stream(signal)).response);
  page.at("send").focus();
  page.send("story");
  await settled();
  assert.equal(page.document.activeElement, page.at("text"), "the send button is hidden");
  reply.say("once");
  await settled();
  page.at("stop").focus();
  page.at("stop").click();
  await settled();
  assert.match(page.log(), /once.*stopped/);
  assert.equal(page.document.activeElement, page.at("text"));
  page.send("go on");
  await settled();
  assert.deepEqual(roles(page.asked()[1]), ["user: story", "assistant: once", "user: go on"]);
});

test("the status page of a server with keys asks for one", async () => {
  const status = 'event: status\ndata: {"model":"tiny","phase":"ready","slots":{"sequences":1,"total":4,"requests":[]}}\n\n';
  const answer = () => new Response(new ReadableStream({ start: (sink) => sink.enqueue(new TextEncoder().encode(status)) }));
  const page = await open("status.html", answer, { needsKey: true });
  assert.match(page.at("line").textContent, /needs an API key/);
  assert.equal(page.at("unlock").hidden, false);
  page.at("key").value = "wrong";
  page.submit(page.at("unlock"));
  await settled();
  assert.match(page.at("line").textContent, /does not know this key/);
  page.at("key").value = "right";
  page.submit(page.at("unlock"));
  await settled();
  assert.match(page.at("model").textContent, /tiny \(ready\)/);
  assert.equal(page.at("unlock").hidden, true);
  assert.equal(page.window.sessionStorage.getItem("key"), "right", "the chat page has it too");
  const linked = await open("status.html", answer, { needsKey: true, hash: "#key=right" });
  assert.match(linked.at("model").textContent, /tiny/);
  assert.ok(page.calls.every((call) => call.path === "status/events"), "relative, for proxies with a path of their own");
});
