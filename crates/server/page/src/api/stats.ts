// Figures of a reply: from the server's `usage` and `timings`, in words that people know.

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
  completion_tokens_details?: { reasoning_tokens?: number } | null;
}

export interface Timings {
  prefill_ms?: number;
  decode_ms?: number;
  decode_tokens_per_sec?: number;
  tokens_per_step?: number;
  draft_n?: number;
  draft_n_accepted?: number;
  accept_rate?: number;
  [name: string]: unknown;
}

export interface ReplyStats {
  usage: Usage | null;
  timings: Timings | null;
  /** The server's reason: stop, length, tool_calls. */
  reason: string | null;
  /** From the request to the first text, measured here. */
  firstMs: number | null;
}

const count = new Intl.NumberFormat("en");
export const number = (value: number): string => count.format(value);

/** A duration as people say it. */
export function duration(ms: number): string {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

export const percent = (part: number): string => `${Math.round(part * 100)} %`;

/** The line below a reply. */
export function summary(stats: ReplyStats): string {
  const { usage, timings } = stats;
  const parts: string[] = [];
  if (usage) parts.push(`${number(usage.completion_tokens)} tokens`);
  const rate = timings?.decode_tokens_per_sec;
  if (rate) parts.push(`${rate >= 100 ? Math.round(rate) : rate.toFixed(1)} per second`);
  if (timings?.draft_n && timings.accept_rate !== undefined) parts.push(`${percent(timings.accept_rate)} of guesses right`);
  const reused = usage?.prompt_tokens_details?.cached_tokens;
  if (usage && reused) parts.push(`${percent(reused / usage.prompt_tokens)} of the prompt remembered`);
  if (stats.reason === "length") parts.push("cut at the length limit");
  return parts.join(" · ");
}

export interface SourceCounts {
  source: string;
  /** Guessed tokens; null where a server counts the right ones only. */
  drafted: number | null;
  accepted: number;
}

/** Guesses by source, wherever the server reports them: as counts of right ones, or as objects with both counts. */
export function bySource(timings: Timings): SourceCounts[] {
  const found: SourceCounts[] = [];
  const asNumber = (value: unknown): number | null => (typeof value === "number" ? value : null);
  for (const [key, value] of Object.entries(timings)) {
    if (!key.includes("source") || typeof value !== "object" || value === null) continue;
    for (const [source, entry] of Object.entries(value)) {
      const counts = (typeof entry === "object" ? entry : { accepted: entry }) as Record<string, unknown> | null;
      const accepted = asNumber(counts?.["draft_n_accepted"]) ?? asNumber(counts?.["accepted"]);
      const drafted = asNumber(counts?.["draft_n"]) ?? asNumber(counts?.["drafted"]);
      if (accepted !== null && drafted !== 0) found.push({ source, drafted, accepted });
    }
  }
  return found;
}

/** What people call the sources of guesses. */
export const SOURCES: Record<string, string> = {
  mtp: "the model's own next-token head",
  block: "the draft model",
  dflash: "the draft model",
  suffix: "text that repeats",
  lookup: "text that repeats",
};

/** All figures of a reply with what they mean. */
export function details(stats: ReplyStats): [string, string][] {
  const { usage, timings } = stats;
  const rows: [string, string][] = [];
  if (usage) {
    const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
    rows.push(["Prompt", `${number(usage.prompt_tokens)} tokens`]);
    rows.push(["Remembered from before", `${number(reused)} of ${number(usage.prompt_tokens)} prompt tokens`]);
  }
  if (timings?.prefill_ms !== undefined) rows.push(["Reading the rest took", duration(timings.prefill_ms)]);
  if (stats.firstMs !== null) rows.push(["First words after", duration(stats.firstMs)]);
  if (usage) {
    rows.push(["Reply", `${number(usage.completion_tokens)} tokens`]);
    const thought = usage.completion_tokens_details?.reasoning_tokens;
    if (thought) rows.push(["Of these, thinking", `${number(thought)} tokens`]);
  }
  if (timings?.decode_ms !== undefined) rows.push(["Writing took", duration(timings.decode_ms)]);
  if (timings?.decode_tokens_per_sec) rows.push(["Speed", `${timings.decode_tokens_per_sec} tokens a second`]);
  if (timings?.draft_n) {
    rows.push(["Guessed ahead", `${number(timings.draft_n)} tokens, ${number(timings.draft_n_accepted ?? 0)} right`]);
    for (const { source, drafted, accepted } of bySource(timings)) {
      const of = drafted === null ? "" : ` of ${number(drafted)}`;
      rows.push([`Right guesses of ${SOURCES[source] ?? source}`, `${number(accepted)}${of} tokens`]);
    }
  }
  if (timings?.tokens_per_step) rows.push(["Tokens a step", String(timings.tokens_per_step)]);
  if (stats.reason) rows.push(["Ended because", REASONS[stats.reason] ?? stats.reason]);
  return rows;
}

const REASONS: Record<string, string> = {
  stop: "the reply was complete",
  length: "the length limit was reached",
  tool_calls: "the model called a tool",
};
