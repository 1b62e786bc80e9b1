// The live state of the server: its events, and its metrics every two seconds. After a break it connects again.

import { signal } from "@preact/signals";
import { EventSourceParserStream } from "eventsource-parser/stream";
import { faultFrom } from "../api/fault.ts";
import { getJson, needsKey, request } from "../api/server.ts";
import { parseMetrics, total, type Sample } from "./metrics.ts";

export interface RequestLine {
  id: number;
  state: string;
  session: string | null;
  priority: number;
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  max_tokens: number;
  age_s: number;
}

export interface Status {
  model: string;
  phase: string;
  started: number;
  slots: {
    total: number | null;
    context: number | null;
    sequences: number;
    requests_running: number;
    requests_waiting: number;
    pool_tokens: number;
    free_context_tokens: number;
    evictable_context_tokens: number;
    generated_tokens: number;
    prompt_tokens: number;
    snapshots: number;
    snapshot_bytes: number;
    requests: RequestLine[];
  };
}

export const status = signal<Status | null>(null);
export const samples = signal<Sample[]>([]);
export const memoryBytes = signal<number | null>(null);
/** What the connection does, as a sentence; empty while all is well. */
export const trouble = signal("Connecting…");
/** Tokens a second, one value a second, newest last. */
export const rates = signal<number[]>([]);
/** Tokens a second by request. */
export const rateOf = signal<ReadonlyMap<number, number>>(new Map());

const RATES_KEPT = 120;
const METRICS_MS = 2000;
/** Waiting times between attempts, in seconds. */
const RETRY_S = [1, 2, 4, 8, 15];

let attempt = 0;
let timer: ReturnType<typeof setTimeout> | undefined;
/** Tokens since the last value of `rates`. */
let recent = 0;

export function start(): void {
  setInterval(() => {
    rates.value = [...rates.value, recent].slice(-RATES_KEPT);
    recent = 0;
  }, 1000);
  setInterval(() => {
    if (document.visibilityState === "visible" && trouble.value === "") void readMetrics();
  }, METRICS_MS);
  void connect();
}

/** Connects now, also while the next attempt is being waited for. */
export async function connect(): Promise<void> {
  clearTimeout(timer);
  try {
    await follow();
    throw new Error("The server has closed the connection.");
  } catch (thrown) {
    const fault = faultFrom(thrown);
    if (needsKey.value || fault.kind === "refused") {
      trouble.value = fault.message;
      return;
    }
    const wait = RETRY_S[Math.min(attempt++, RETRY_S.length - 1)] ?? 15;
    trouble.value = `${fault.message} Trying again in ${wait} s.`;
    timer = setTimeout(() => void connect(), wait * 1000);
  }
}

async function follow(): Promise<void> {
  const response = await request("status/events");
  if (!response.body) return;
  trouble.value = "";
  attempt = 0;
  void readMetrics();
  void getJson<{ runtime?: { memory_bytes?: number } }>("props").then(
    (found) => (memoryBytes.value = found.runtime?.memory_bytes ?? null),
    () => undefined,
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    if (value.event === "status") {
      status.value = JSON.parse(value.data) as Status;
      const ids = new Set(status.value.slots.requests.map((one) => one.id));
      rateOf.value = new Map([...rateOf.value].filter(([id]) => ids.has(id)));
    }
    if (value.event === "token") addTokens(JSON.parse(value.data) as { id: number; tokens: number });
  }
}

/** Token events come every quarter of a second; the rate is smoothed. */
function addTokens({ id, tokens }: { id: number; tokens: number }): void {
  recent += tokens;
  const before = rateOf.value.get(id) ?? tokens * 4;
  rateOf.value = new Map(rateOf.value).set(id, 0.7 * before + 0.3 * tokens * 4);
}

async function readMetrics(): Promise<void> {
  // A server may have its metrics switched off.
  samples.value = await request("metrics")
    .then((response) => response.text())
    .then(parseMetrics, () => []);
}

/** The share that `part` is of `whole`, over the life of the server. */
export function share(part: string, whole: string): number | null {
  const [some, all] = [total(samples.value, part), total(samples.value, whole)];
  return some === null || !all ? null : some / all;
}
