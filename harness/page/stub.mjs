// A server for tests of the pages: it serves the committed pages with their policies, and its API answers as the test
// says, word by word. It needs no model, so every state of the page can be held for as long as a test looks at it.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const pages = join(resolve(dirname(fileURLToPath(import.meta.url)), "../.."), "crates/server/src/http/page");
export const pageFile = (name) => readFileSync(join(pages, name), "utf8");

/** What does not come within this time will not come, on a machine with other work too. */
export const WAIT_MS = 120_000;

export const USAGE = {
  prompt_tokens: 1300,
  completion_tokens: 52,
  total_tokens: 1352,
  prompt_tokens_details: { cached_tokens: 1204 },
  completion_tokens_details: { reasoning_tokens: 20 },
};
export const TIMINGS = {
  prefill_ms: 67.7,
  decode_ms: 1200.2,
  decode_tokens_per_sec: 43.3,
  tokens_per_step: 3.1,
  draft_n: 100,
  draft_n_accepted: 78,
  accept_rate: 0.78,
  draft_by_source: { mtp: { draft_n: 60, draft_n_accepted: 40 }, suffix: { draft_n: 40, draft_n_accepted: 38 }, block: { draft_n: 0, draft_n_accepted: 0 } },
};

/** One reply that is being written. */
class Reply {
  constructor(response, body) {
    this.response = response;
    this.body = body;
    this.isGone = new Promise((done) => response.on("close", done));
  }
  event(data) {
    if (!this.response.headersSent) this.response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
    this.response.write(`data: ${typeof data === "string" ? data : JSON.stringify(data)}\n\n`);
  }
  delta(delta, more = {}) {
    this.event({ model: "tiny", choices: [{ delta, finish_reason: null }], ...more });
  }
  say(content) {
    this.delta({ content });
  }
  think(reasoning_content) {
    this.delta({ reasoning_content });
  }
  progress(processed, total) {
    this.delta({}, { prompt_progress: { total, cache: 0, processed, time_ms: 1 } });
  }
  call(index, part) {
    this.delta({ tool_calls: [{ index, ...part }] });
  }
  end(reason = "stop", usage = USAGE, timings = TIMINGS) {
    this.event({ choices: [{ delta: {}, finish_reason: reason }], timings });
    this.event({ choices: [], usage, timings });
    this.event("[DONE]");
    this.response.end();
  }
  fail(error) {
    this.event({ error });
    this.event("[DONE]");
    this.response.end();
  }
  cut() {
    this.response.destroy();
  }
  refuse(status, error, headers = {}) {
    this.response.writeHead(status, { "content-type": "application/json", ...headers });
    this.response.end(error === null ? "<html>bad gateway</html>" : JSON.stringify({ error }));
  }
}

/** Starts a stub; `close` ends it. */
export async function startStub() {
  const stub = {
    models: [{ id: "tiny", context_length: 4096 }],
    /** The only key that is taken, or null for an open server. */
    key: null,
    props: { default_generation_settings: { temperature: 0.3, top_p: 0.95 }, reasoning: { supported: true, default: true, supported_efforts: ["none", "low", "high"] } },
    metrics: "",
    /** Bodies of the chat requests so far. */
    asked: [],
    /** Status events, as objects; a watcher gets all of them and then those that come. */
    status: [],
    isStatusDown: false,
    /** Whether every request for a reply is cut. */
    isDown: false,
    watchers: new Set(),
    /** Replies that wait for the test. */
    waiting: [],
    takers: [],
    /** The next request for a reply, as soon as it is there. */
    next() {
      const reply = this.waiting.shift();
      if (reply) return Promise.resolve(reply);
      return new Promise((done, fail) => {
        const late = setTimeout(() => fail(new Error(`the page asked for no reply within ${WAIT_MS} ms`)), WAIT_MS);
        this.takers.push((reply) => {
          clearTimeout(late);
          done(reply);
        });
      });
    },
    /** Answers the next request at once. */
    async answer(text, { think, reason, usage, timings } = {}) {
      const reply = await this.next();
      if (think) reply.think(think);
      reply.say(text);
      reply.end(reason, usage, timings);
      return reply;
    },
    sendStatus(event, data) {
      for (const watcher of this.watchers) watcher.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
    },
    dropWatchers() {
      for (const watcher of this.watchers) watcher.destroy();
    },
  };
  const server = createServer(async (asked, response) => {
    const path = asked.url.split("?")[0];
    const json = (status, body) => {
      response.writeHead(status, { "content-type": "application/json" });
      response.end(JSON.stringify(body));
    };
    const name = path === "/" ? "index" : path === "/status" ? "status" : null;
    if (name) {
      response.writeHead(200, { "content-type": "text/html; charset=utf-8", "content-security-policy": pageFile(`${name}.csp`).trim() });
      response.end(pageFile(`${name}.html`));
      return;
    }
    if (stub.key !== null && asked.headers.authorization !== `Bearer ${stub.key}`) {
      const said = asked.headers.authorization ? "the API key is not one this server knows" : "this server needs an API key";
      json(401, { error: { message: said, code: "invalid_api_key" } });
      return;
    }
    if (path === "/v1/models") json(200, { data: stub.models });
    else if (path === "/props") json(200, stub.props);
    else if (path === "/version") json(200, { version: "0.0.0" });
    else if (path === "/metrics") response.end(stub.metrics);
    else if (path === "/status/events" && stub.isStatusDown) response.destroy();
    else if (path === "/status/events") {
      response.writeHead(200, { "content-type": "text/event-stream" });
      response.flushHeaders();
      stub.watchers.add(response);
      response.on("close", () => stub.watchers.delete(response));
      for (const status of stub.status) response.write(`event: status\ndata: ${JSON.stringify(status)}\n\n`);
    } else if (path === "/v1/chat/completions" && stub.isDown) response.destroy();
    else if (path === "/v1/chat/completions") {
      const parts = [];
      for await (const part of asked) parts.push(part);
      const body = JSON.parse(Buffer.concat(parts).toString());
      stub.asked.push(body);
      const reply = new Reply(response, body);
      const taker = stub.takers.shift();
      if (taker) taker(reply);
      else stub.waiting.push(reply);
    } else json(404, { error: { message: `nothing is served at ${path}` } });
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  stub.url = `http://127.0.0.1:${server.address().port}/`;
  stub.close = () => {
    server.closeAllConnections();
    server.close();
  };
  return stub;
}
