// Tests the pages without a browser, as part of the gate: the committed bundles run in jsdom against a server made of
// functions, and the Markdown modules run on their own. `run.mjs` tests the pages in a browser.
//
//   python3 harness/clients/install.py dom        (jsdom, pinned)
//   (cd crates/server/page && npm ci)             (esbuild and what the pages are made with, pinned)
//   node --test harness/page/script.mjs

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";
import { pageFile, WAIT_MS } from "./stub.mjs";

const root = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const source = join(root, "crates/server/page");
const { JSDOM } = createRequire(join(root, "target/harness/dom/package.json"))("jsdom");

/** Windows have timers: the process ends once all are closed. */
const windows = [];
after(() => windows.forEach((window) => window.close()));

const json = (status, body) => new Response(JSON.stringify(body), { status });

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
  const dom = new JSDOM(pageFile(file), {
    url: `http://127.0.0.1:8000/${file === "status.html" ? "status" : ""}${hash}`,
    runScripts: "dangerously",
    pretendToBeVisual: true,
    beforeParse(window) {
      Object.assign(window, { TextDecoderStream, TransformStream, ReadableStream });
      window.fetch = async (path, init = {}) => {
        const key = init.headers?.authorization;
        calls.push({ path, key, body: init.body && JSON.parse(init.body) });
        if (needsKey && key !== "Bearer right") {
          return json(401, { error: { message: key ? "the API key is not one this server knows" : "this server needs an API key" } });
        }
        if (path === "v1/models") return json(200, { data: [{ id: "tiny", context_length: 4096 }] });
        return path === "props" || path === "metrics" ? json(200, {}) : answer(init.signal, calls.length);
      };
    },
  });
  windows.push(dom.window);
  const { document } = dom.window;
  const click = (label) => document.querySelector(`[aria-label="${label}"]`).click();
  const page = {
    calls,
    document,
    window: dom.window,
    text: () => document.getElementById("text"),
    log: () => document.getElementById("thread").textContent,
    asked: () => calls.filter((call) => call.path === "v1/chat/completions").map((call) => call.body),
    /** The body of the request number `at` for a reply, as soon as it is there. */
    async request(at) {
      await eventually(() => page.asked().length > at);
      return page.asked()[at];
    },
    shows: (pattern) => eventually(() => assert.match(page.log(), pattern)),
    /** Waits until no reply runs in the shown conversation. */
    ended: () => eventually(() => document.getElementById("send")),
    click,
    type(value) {
      page.text().value = value;
      page.text().dispatchEvent(new dom.window.Event("input", { bubbles: true }));
    },
    /** Sends a message and waits until it is asked. */
    async send(value) {
      await page.ended();
      const before = page.asked().length;
      page.type(value);
      await settled();
      document.getElementById("composer").dispatchEvent(new dom.window.Event("submit", { cancelable: true, bubbles: true }));
      await page.request(before);
      await settled();
    },
    newChat: () => [...document.querySelectorAll("#sidebar button")].find((one) => one.textContent.includes("New chat")).click(),
    submit: (form) => form.dispatchEvent(new dom.window.Event("submit", { cancelable: true, bubbles: true })),
  };
  await settled();
  return page;
}

/** Waits until promises, streams, frames and the timer of the page have nothing left to do. */
async function settled() {
  for (let turns = 0; turns < 4; turns++) await new Promise((later) => setTimeout(later, 30));
}

/** Waits until `holds` throws nothing and gives neither false nor null: a slow machine takes longer than `settled`. */
async function eventually(holds) {
  const until = performance.now() + WAIT_MS;
  for (;;) {
    try {
      assert.ok(![false, null].includes(holds()), `never came: ${holds}`);
      return;
    } catch (thrown) {
      if (performance.now() > until) throw thrown;
    }
    await settled();
  }
}

const roles = (body) => body.messages.map((message) => `${message.role}: ${message.content}`);

/** A page whose replies the test writes, in the order of the requests. */
async function withStreams() {
  const streams = [];
  const page = await open("index.html", (signal) => (streams.push(stream(signal)), streams.at(-1).response));
  return { page, streams };
}

test("a new chat gets nothing of an answer that is running", async () => {
  const { page, streams } = await withStreams();
  await page.send("first");
  streams[0].say("old text");
  await settled();
  await page.shows(/old text/);
  page.newChat();
  await settled();
  assert.doesNotMatch(page.log(), /old text/);
  await page.send("second");
  streams[0].say(" goes on");
  streams[0].end();
  await settled();
  assert.doesNotMatch(page.log(), /old text|goes on|first/);
  assert.deepEqual(roles(await page.request(1)), ["user: second"]);
  await eventually(() => page.document.getElementById("stop"));
  streams[1].say("new text");
  streams[1].end();
  await settled();
  await page.send("third");
  assert.deepEqual(roles(await page.request(2)), ["user: second", "assistant: new text", "user: third"]);
});

test("messages after an error work, and the question is not lost", async () => {
  const answers = [
    [() => json(400, { error: { message: "too many tools" } }), /Too many tools\./],
    [() => new Response("<html>bad gateway</html>", { status: 502 }), /The server answered with status 502/],
    [() => Promise.reject(new TypeError("fetch failed")), /The server cannot be reached/],
  ];
  let good;
  const page = await open("index.html", (signal) => (answers.length > 0 ? answers.shift()[0]() : (good = stream(signal)).response));
  for (const said of answers.map(([, said]) => said)) {
    await page.send("my question");
    await page.shows(said);
    await page.shows(/my question.*Not answered/);
    await page.ended();
  }
  const retry = [...page.document.querySelectorAll("div.fault button")].at(-1);
  retry.click();
  await settled();
  assert.deepEqual(roles(await page.request(3)), ["user: my question"]);
  good.say("answer");
  good.end();
  await settled();
  await page.send("more");
  assert.deepEqual(roles(page.asked().at(-1)), ["user: my question", "assistant: answer", "user: more"]);
});

test("an error within a stream is shown, and what came before it stays", async () => {
  const { page, streams } = await withStreams();
  await page.send("a");
  streams[0].say("half");
  streams[0].fail("the device is gone");
  await settled();
  await page.shows(/half.*The device is gone\./);
  await page.send("b");
  assert.deepEqual(roles(await page.request(1)), ["user: a", "assistant: half", "user: b"]);
  streams[1].cut();
  await settled();
  await page.shows(/b.*The connection ended before the reply was complete/);
});

test("text that is typed meanwhile is not replaced by a failed question", async () => {
  let failed;
  const page = await open("index.html", () => new Promise((done) => (failed = () => done(json(500, {})))));
  await page.send("question");
  page.type("typed meanwhile");
  failed();
  await settled();
  assert.equal(page.text().value, "typed meanwhile");
});

test("the server's defaults hold unless the user chooses", async () => {
  const page = await open("index.html", (signal) => {
    const reply = stream(signal);
    reply.say("x");
    reply.end();
    return reply.response;
  });
  await page.send("hello");
  assert.deepEqual(Object.keys(page.asked()[0]).sort(), ["messages", "return_progress", "stream", "stream_options"]);
  page.click("Settings");
  await settled();
  const thinking = [...page.document.querySelectorAll("label")].find((one) => one.textContent.startsWith("Thinks before")).querySelector("select");
  for (const [choice, sent] of [["on", true], ["off", false], ["", undefined]]) {
    thinking.value = choice;
    thinking.dispatchEvent(new page.window.Event("change", { bubbles: true }));
    await page.send("hello");
    assert.equal(page.asked().at(-1).enable_thinking, sent);
    assert.equal("enable_thinking" in page.asked().at(-1), choice !== "");
  }
});

test("stop ends the answer and moves the focus to the text", async () => {
  const { page, streams } = await withStreams();
  await page.send("story");
  streams[0].say("once");
  await settled();
  page.document.getElementById("stop").focus();
  page.document.getElementById("stop").click();
  await settled();
  await page.shows(/once.*You stopped this reply/);
  await eventually(() => page.document.activeElement === page.text());
  await page.send("go on");
  assert.deepEqual(roles(await page.request(1)), ["user: story", "assistant: once", "user: go on"]);
});

test("markup in a reply is text", async () => {
  const { page, streams } = await withStreams();
  await page.send("x");
  const hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script> [a](javascript:alert)';
  for (const piece of hostile) streams[0].say(piece);
  streams[0].end();
  await settled();
  await page.ended();
  assert.equal(page.document.querySelectorAll("#thread img, #thread script, #thread a").length, 0);
  assert.equal(page.document.querySelector(".markdown").textContent, hostile);
  assert.equal(page.document.title, "x · Hearth");
});

test("the status page of a server with keys asks for one", async () => {
  const status = { model: "tiny", phase: "ready", started: 1, slots: { sequences: 1, total: 4, pool_tokens: 0, free_context_tokens: 0, evictable_context_tokens: 0, generated_tokens: 0, prompt_tokens: 0, snapshots: 0, snapshot_bytes: 0, requests_running: 0, requests_waiting: 0, requests: [] } };
  const event = `event: status\ndata: ${JSON.stringify(status)}\n\n`;
  const answer = () => new Response(new ReadableStream({ start: (sink) => sink.enqueue(new TextEncoder().encode(event)) }));
  const page = await open("status.html", answer, { needsKey: true });
  const line = () => page.document.querySelector("[role=status]").textContent;
  await eventually(() => assert.match(line(), /This server needs an API key/));
  for (const [key, said] of [["wrong", /is not one this server knows/], ["right", /Live/]]) {
    page.document.querySelector("#unlock input").value = key;
    page.submit(page.document.getElementById("unlock"));
    await settled();
    await eventually(() => assert.match(line(), said));
  }
  await eventually(() => assert.match(page.document.querySelector("h1").textContent, /tiny ready/));
  assert.equal(page.document.getElementById("unlock"), null);
  assert.equal(page.window.sessionStorage.getItem("key"), "right", "the chat page has it too");
  const linked = await open("status.html", answer, { needsKey: true, hash: "#key=right" });
  await eventually(() => assert.match(linked.document.querySelector("h1").textContent, /tiny/));
  assert.equal(linked.window.location.hash, "", "the key goes out of the address");
  assert.ok(page.calls.every((call) => !call.path.startsWith("/")), "relative, for proxies with a path of their own");
});

/** Modules of the pages' source, built for this process; each `name` gets state of its own, like a tab. */
async function modules(name = "") {
  const esbuild = createRequire(join(source, "package.json"))("esbuild");
  const built = await esbuild.build({
    stdin: {
      contents: `export { Blocks } from "./markdown/blocks.ts";
        export * from "./state/conversation.ts";
        export { parseMetrics, total } from "./status/metrics.ts";
        export { bySource, summary, duration } from "./api/stats.ts";
        export { Saver } from "./state/saver.ts";
        export * as journal from "./state/journal.ts";`,
      resolveDir: join(source, "src"),
    },
    bundle: true,
    write: false,
    format: "esm",
    platform: "node",
    footer: { js: `// ${name}` },
  });
  return import(`data:text/javascript;base64,${Buffer.from(built.outputFiles[0].text).toString("base64")}`);
}

const SAMPLES = [
  "# A\n\ntext\n\n## B\n\n- a\n- b\n\n  c\n\n1. x\n\n\n2. y\n\nend",
  "Title\n---\n\nOther\n===\n\n***\n\n> quote\ngoes on\n\nnew",
  "| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3\n\nafter | it\n\n    code\n\n    more\n",
  "```py\nx = 1\n\n\ny = 2\n```\n\n~~~\nopen to the end\n\n# no heading",
  "$$\na\n\nb\n$$\n\n\\[\nx\n\ny\n\\]\n\n$z$ and \\(w\\)",
  "see [one][r] and [two]\n\n- [two] here\n\n[r]: https://a.example\n[two]: https://b.example 'title'\n",
  "- a\n\n      code in it\n- b\n   - c\n\n\ntext\n  - [x] task\n<div>\n\nhtml\n\n</div>\n",
  "a\r\nb\r\n\r\n- c\r\n",
];

test("Markdown that comes in pieces is that of the whole text", async () => {
  const { Blocks } = await modules();
  const plain = (blocks) => JSON.stringify(blocks.map(({ tokens, depth }) => [depth, tokens.map((token) => [token.type, token.tag, token.content, token.children?.map((child) => [child.type, child.content, child.attrs])])]));
  let seed = 7;
  const random = (below) => (seed = (seed * 1103515245 + 12345) % 2147483648) % below;
  for (let round = 0; round < 200; round++) {
    const text = Array.from({ length: 1 + random(4) }, () => SAMPLES[random(SAMPLES.length)]).join("\n\n");
    const blocks = new Blocks();
    for (let at = 0; at < text.length; at += 1 + random(12)) blocks.update(text.slice(0, at), false);
    assert.equal(plain(blocks.update(text, true)), plain(new Blocks().update(text, true)), text);
  }
});

test("the cost of a token does not grow with the reply", async () => {
  const { Blocks } = await modules();
  const blocks = new Blocks();
  let text = "";
  for (let n = 0; n < 2000; n++) {
    text += `Paragraph ${n} with some words.\n\n`;
    blocks.update(text, false);
  }
  assert.ok(blocks.parsed < 5 * text.length, `${blocks.parsed} characters were parsed for ${text.length}`);
  const before = blocks.update(text, false);
  const after = blocks.update(`${text}more`, false);
  assert.ok(before.slice(0, -2).every((block, at) => block === after[at]), "settled blocks are the same objects");
});

test("conversations keep every version", async () => {
  const { add, choose, emptyConversation, newMessage, path, questionText, unanswered, versions } = await modules();
  let conversation = emptyConversation("");
  const put = (parent, role, content, fields = {}) => {
    const message = newMessage(parent, role, { content, ...fields });
    conversation = add(conversation, message);
    return message;
  };
  const one = put(null, "user", "one");
  const first = put(one.id, "assistant", "first");
  put(first.id, "user", "two");
  const second = put(one.id, "assistant", "second");
  const texts = () => path(conversation).map((message) => message.content);
  assert.deepEqual(texts(), ["one", "second"]);
  assert.deepEqual(versions(conversation, second).map((message) => message.content).sort(), ["first", "second"]);
  conversation = choose(conversation, first);
  assert.deepEqual(texts(), ["one", "first", "two"]);
  assert.equal(conversation.title, "one");
  const failed = put(path(conversation).at(-1).id, "assistant", "", { state: "failed" });
  assert.deepEqual([...unanswered(path(conversation))], [failed.id, failed.parent]);
  assert.equal(questionText(newMessage(null, "user", { content: "q", files: [{ name: "a", text: "```x" }] })), "File a:\n````\n```x\n````\n\nq");
});

test("a conversation is unsaved until storage has confirmed its last version", async () => {
  const { Saver } = await modules();
  const [writes, saved] = [[], []];
  const write = (conversation) => new Promise((done, refuse) => writes.push({ conversation, done, refuse }));
  const saver = new Saver(write, (id) => saved.push(id));
  const version = (id, content) => ({ id, content });
  const unsaved = () => saver.unsaved().map(({ content }) => content);
  const versions = ["a1", "a2", "a3"].map((content) => version("a", content));
  const first = saver.save(versions[0]);
  assert.deepEqual(writes.map(({ conversation }) => conversation.content), ["a1"], "the write begins within the call");
  saver.save(versions[1]);
  saver.save(versions[2]);
  void saver.save(version("b", "b1"));
  assert.deepEqual(writes.map(({ conversation }) => conversation.content), ["a1", "b1"], "saves of one do not overtake each other");
  assert.deepEqual(unsaved(), ["a3", "b1"]);
  writes[1].done();
  writes[0].done();
  await settled();
  assert.deepEqual(writes.map(({ conversation }) => conversation.content), ["a1", "b1", "a3"], "the last version is saved again");
  assert.deepEqual([unsaved(), saved], [["a3"], ["b"]]);
  writes[2].done();
  await first;
  assert.deepEqual([unsaved(), saved], [[], ["b", "a"]]);

  const refused = saver.save(versions[0]);
  writes[3].refuse(new Error("no space"));
  await assert.rejects(refused, /no space/);
  assert.deepEqual([unsaved(), saved.length], [["a1"], 2], "a refused version stays unsaved");
  const tried = saver.save(versions[1]);
  void saver.save(versions[2]);
  writes[4].refuse(new Error("no space"));
  await settled();
  writes[5].done();
  await tried;
  assert.deepEqual(unsaved(), [], "a version that came meanwhile is tried too");
  void saver.save(versions[0]);
  saver.forget("a");
  writes[6].done();
  await settled();
  assert.deepEqual([unsaved(), writes.length], [[], 7], "nothing of a removed conversation is written again");
});

test("the journal keeps what a page could not save, each tab its own", async () => {
  const { window } = new JSDOM("", { url: "http://127.0.0.1:8000/" });
  windows.push(window);
  Object.defineProperty(globalThis, "localStorage", { value: window.localStorage, configurable: true });
  const [first, second, later] = [(await modules()).journal, (await modules("2")).journal, (await modules("3")).journal];
  const version = (id, updated, title) => ({ id, updated, title, messages: {} });
  const taken = [];
  const take = async (conversation) => void taken.push(conversation.title);
  assert.equal(await later.recover(take), false);
  first.keep(version("a", 1, "older"));
  first.keep(version("a", 2, "of the first tab"));
  second.keep(version("a", 3, "of the second tab"));
  first.keep(version("b", 1, "saved after all"));
  second.forget("b");
  first.forget("b");
  window.localStorage.setItem("hearth.unsaved.x.y", "{");
  window.localStorage.setItem("hearth.unsaved.x.z", '{"id":"x"}');
  assert.equal(await later.recover(take), true);
  assert.deepEqual(taken.sort(), ["of the first tab", "of the second tab"]);
  assert.equal(window.localStorage.length, 0);

  first.keep(version("a", 4, "refused"));
  await assert.rejects(later.recover(() => Promise.reject(new Error("no space"))), /no space/);
  const changed = later.recover(async () => first.keep(version("a", 5, "written meanwhile")));
  assert.equal(await changed, true);
  assert.match(window.localStorage.getItem(window.localStorage.key(0)), /written meanwhile/);
  second.forgetAll("a");
  assert.equal(window.localStorage.length, 0, "a removed conversation is in no journal");

  // A browser that has no space left.
  window.Storage.prototype.setItem = () => {
    throw new window.DOMException("full", "QuotaExceededError");
  };
  first.keep(version("a", 6, "too long"));
  assert.equal(window.localStorage.length, 0);
});

test("figures and metrics are read as they are sent", async () => {
  const { bySource, parseMetrics, total, summary, duration } = await modules();
  assert.deepEqual(bySource({ by_source: { a: 3, b: { accepted: 1 }, c: "x" }, source: "y", other: { d: 1 } }), [
    { source: "a", drafted: null, accepted: 3 },
    { source: "b", drafted: null, accepted: 1 },
  ]);
  const samples = parseMetrics('# HELP a b\na_total{x="1",y="q\\"z"} 2\na_total{x="2"} 3.5\nb 1e3\nbad line here\nc NaN\n');
  assert.equal(total(samples, "a_total"), 5.5);
  assert.equal(samples[0].labels.y, 'q"z');
  assert.equal(total(samples, "b"), 1000);
  assert.equal(total(samples, "c"), null);
  assert.equal(summary({ usage: null, timings: null, reason: null, firstMs: null }), "");
  assert.equal(duration(61_000), "1 min 1 s");
});

test("the policy of a page names its script and its style", async () => {
  const { createHash } = await import("node:crypto");
  for (const name of ["index", "status"]) {
    const [html, policy] = [pageFile(`${name}.html`), pageFile(`${name}.csp`)];
    for (const tag of ["script", "style"]) {
      const inside = html.slice(html.indexOf(`<${tag}>`) + tag.length + 2, html.lastIndexOf(`</${tag}>`));
      const hash = createHash("sha256").update(inside).digest("base64");
      assert.ok(policy.includes(`${tag}-src 'sha256-${hash}'`), `${name}: ${tag}`);
      assert.doesNotMatch(policy, /unsafe|\*|https?:/);
    }
  }
});
