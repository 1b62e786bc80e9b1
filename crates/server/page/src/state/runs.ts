// Replies that are being written. A reply belongs to its conversation: it goes on there while another is shown.

import { signal, type Signal } from "@preact/signals";
import { apiMessages, chosenFields, complete, type Chunk, type Delta } from "../api/completion.ts";
import { faultFrom, isAbort } from "../api/fault.ts";
import type { ReplyStats } from "../api/stats.ts";
import { add, change, newMessage, path, type Message, type ToolCall } from "./conversation.ts";
import { beforeLeaving, edit, isLeaving, load } from "./conversations.ts";
import { settings } from "./settings.ts";

/** The growing part of a reply. */
export interface Live {
  phase: "waiting" | "reading" | "thinking" | "writing";
  /** Share of the prompt that the model has read, from 0 to 1. */
  progress: number | null;
  content: string;
  reasoning: string;
  calls: ToolCall[];
}

export interface Run {
  conversation: string;
  message: string;
  began: number;
  live: Signal<Live>;
  stop: () => void;
}

/** By conversation: each has one at most. */
export const runs = signal<ReadonlyMap<string, Run>>(new Map());
/** For screen readers: one sentence a change, never the stream. */
export const announcement = signal("");

/** Text on the page changes at most this often; slow pages change less often. */
const FRAME_MS = 40;
/** A running reply is saved at this interval, so that a crash loses little. */
const KEEP_MS = 2000;

function setRun(conversation: string, run: Run | null): void {
  const next = new Map(runs.value);
  if (run) next.set(conversation, run);
  else next.delete(conversation);
  runs.value = next;
}

export function stop(conversation: string): void {
  runs.value.get(conversation)?.stop();
}

interface Progress extends Live {
  thoughtFrom: number | null;
  thinkingMs: number | null;
  firstMs: number | null;
  model: string | null;
  stats: ReplyStats;
}

function addDelta(progress: Progress, delta: Delta, began: number): void {
  const now = performance.now();
  const says = delta.content || delta.reasoning_content || delta.tool_calls;
  if (says && progress.firstMs === null) progress.firstMs = now - began;
  if (delta.reasoning_content) {
    progress.thoughtFrom ??= now;
    progress.phase = "thinking";
    progress.reasoning += delta.reasoning_content;
  }
  if (delta.content || delta.tool_calls) {
    if (progress.thoughtFrom !== null) progress.thinkingMs ??= now - progress.thoughtFrom;
    progress.phase = "writing";
    progress.content += delta.content ?? "";
  }
  for (const part of delta.tool_calls ?? []) {
    const call = (progress.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

function addChunk(progress: Progress, chunk: Chunk, began: number): void {
  const choice = chunk.choices[0];
  progress.model ??= chunk.model ?? null;
  if (chunk.prompt_progress && progress.phase !== "thinking" && progress.phase !== "writing") {
    const { total, processed } = chunk.prompt_progress;
    progress.phase = "reading";
    progress.progress = total > 0 ? processed / total : null;
  }
  if (choice) addDelta(progress, choice.delta, began);
  if (choice?.finish_reason) progress.stats.reason = choice.finish_reason;
  if (chunk.usage) progress.stats.usage = chunk.usage;
  if (chunk.timings) progress.stats.timings = chunk.timings;
}

const live = (progress: Progress): Live => ({
  phase: progress.phase,
  progress: progress.progress,
  content: progress.content,
  reasoning: progress.reasoning,
  calls: progress.calls.map((call) => ({ ...call })),
});

/** Gets a reply to the message `parent`, as a new version beside older ones. Never throws. */
export async function answer(conversationId: string, parent: string): Promise<void> {
  if (runs.value.has(conversationId)) return;
  const reply = newMessage(parent, "assistant", { state: "running" });
  edit(conversationId, (conversation) => add(conversation, reply));
  await write(conversationId, reply, {});
}

/** Lets the model go on with a reply that was cut, in the same message. Never throws. */
export async function goOn(conversationId: string, reply: Message): Promise<void> {
  if (runs.value.has(conversationId)) return;
  edit(conversationId, (conversation) => change(conversation, reply.id, { state: "running", fault: null }));
  await write(conversationId, reply, { continue_final_message: true, add_generation_prompt: false });
}

/** Streams into `reply`, behind the text that it has. */
async function write(conversationId: string, reply: Message, fields: Record<string, boolean>): Promise<void> {
  const controller = new AbortController();
  const began = performance.now();
  const progress: Progress = {
    phase: "waiting",
    progress: null,
    content: reply.content,
    reasoning: reply.reasoning,
    calls: [],
    thoughtFrom: null,
    thinkingMs: reply.thinkingMs,
    firstMs: null,
    model: null,
    stats: { usage: null, timings: null, reason: null, firstMs: null },
  };
  const run: Run = {
    conversation: conversationId,
    message: reply.id,
    began,
    live: signal(live(progress)),
    stop: () => controller.abort(),
  };
  setRun(conversationId, run);
  announcement.value = "The reply has begun.";
  const shownEvery = throttle(() => (run.live.value = live(progress)));
  const keep = (): void => edit(conversationId, (one) => change(one, reply.id, partial(progress)));
  const keeping = setInterval(keep, KEEP_MS);
  beforeLeaving.add(keep);
  let state: "done" | "stopped" | "failed" = "done";
  let fault = null;
  try {
    const conversation = await load(conversationId);
    if (!conversation) return;
    const shown = path(conversation);
    const before = fields["continue_final_message"] ? shown : shown.slice(0, -1);
    const body = { messages: apiMessages(conversation.system, before), ...chosenFields(settings.value), ...fields };
    for await (const chunk of complete(body, controller.signal)) {
      addChunk(progress, chunk, began);
      shownEvery.request();
    }
  } catch (thrown) {
    state = isAbort(thrown) || controller.signal.aborted || isLeaving ? "stopped" : "failed";
    if (state === "failed") fault = faultFrom(thrown);
  } finally {
    clearInterval(keeping);
    beforeLeaving.delete(keep);
    shownEvery.cancel();
  }
  if (progress.thoughtFrom !== null) progress.thinkingMs ??= performance.now() - progress.thoughtFrom;
  progress.stats.firstMs = progress.firstMs;
  const ended = { ...partial(progress), state, fault: fault && { kind: fault.kind, text: fault.message } };
  edit(conversationId, (one) => change(one, reply.id, ended));
  setRun(conversationId, null);
  // A fault on the page is an alert, which is spoken by itself.
  announcement.value = state === "failed" ? "" : `${state === "stopped" ? "The reply was stopped." : "Reply:"} ${progress.content.slice(0, 2000)}`;
}

const partial = (progress: Progress) => ({
  content: progress.content,
  reasoning: progress.reasoning,
  thinkingMs: progress.thinkingMs,
  calls: progress.calls.filter(Boolean),
  model: progress.model,
  stats: progress.stats,
});

/** Runs `work` at the next frame, and less often if a frame took long. Hidden pages get a slow timer. */
function throttle(work: () => void): { request(): void; cancel(): void } {
  let timer: ReturnType<typeof setTimeout> | null = null;
  let wait = FRAME_MS;
  return {
    request() {
      if (timer !== null) return;
      timer = setTimeout(
        () => {
          timer = null;
          const began = performance.now();
          work();
          // Effects are rendered in a microtask; the next task sees what that took.
          setTimeout(() => (wait = Math.min(500, Math.max(FRAME_MS, 4 * (performance.now() - began)))));
        },
        document.visibilityState === "hidden" ? 500 : wait,
      );
    },
    cancel() {
      if (timer !== null) clearTimeout(timer);
    },
  };
}
