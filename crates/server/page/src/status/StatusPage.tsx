// The status of the server: what it does now, how fast, and what it holds in memory.

import type { ComponentChildren, VNode } from "preact";
import { needsKey, setKey } from "../api/server.ts";
import { duration, number, percent, SOURCES } from "../api/stats.ts";
import { connect, memoryBytes, rateOf, rates, samples, share, status, trouble, type RequestLine } from "./feed.ts";
import { hardware, sharesBySource, total } from "./metrics.ts";

export function StatusPage(): VNode {
  const now = status.value;
  return (
    <main class="status">
      <header>
        <h1>
          {now?.model ?? "Hearth"} {now && <span class={`phase ${now.phase}`}>{now.phase}</span>}
        </h1>
        <a href="./">Chat</a>
      </header>
      <p role="status" class={trouble.value ? "trouble" : "well"}>
        {trouble.value || "Live"}
      </p>
      {needsKey.value && <Unlock />}
      {now && (
        <>
          <Tiles />
          <section aria-labelledby="speed">
            <h2 id="speed">Tokens a second, the last two minutes</h2>
            <Chart />
          </section>
          <section aria-labelledby="requests">
            <h2 id="requests">Requests</h2>
            <Requests list={now.slots.requests} />
          </section>
        </>
      )}
    </main>
  );
}

function Unlock(): VNode {
  const done = (event: Event): void => {
    event.preventDefault();
    setKey(String(new FormData(event.currentTarget as HTMLFormElement).get("key") ?? "").trim(), false);
    void connect();
  };
  return (
    <form id="unlock" onSubmit={done}>
      <label>
        API key
        <input name="key" type="password" autocomplete="off" />
      </label>
      <button class="primary">Open</button>
    </form>
  );
}

function Tile({ name, value, note }: { name: string; value: ComponentChildren; note?: ComponentChildren }): VNode {
  return (
    <div class="tile">
      <dt>{name}</dt>
      <dd>
        <strong>{value}</strong>
        {note && <span>{note}</span>}
      </dd>
    </div>
  );
}

const bytes = (value: number): string => {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const at = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${(value / 1024 ** at).toFixed(at > 1 ? 1 : 0)} ${units[at]}`;
};

function Tiles(): VNode | null {
  const now = status.value;
  if (!now) return null;
  const { slots } = now;
  const used = slots.pool_tokens - slots.free_context_tokens;
  const accepted = share("hearth_draft_tokens_accepted_total", "hearth_draft_tokens_total");
  const steps = total(samples.value, "hearth_decode_sequence_steps_total");
  const generated = total(samples.value, "hearth_generation_tokens_total");
  const reused = share("hearth_prompt_tokens_cached_total", "hearth_prompt_tokens_total");
  const speed = rates.value.slice(-3);
  const mean = speed.length > 0 ? speed.reduce((sum, rate) => sum + rate, 0) / speed.length : 0;
  return (
    <dl class="tiles">
      <Tile name="Answering" value={number(slots.requests_running)} note={`${number(slots.requests_waiting)} waiting${slots.total ? `, room for ${number(slots.total)} at once` : ""}`} />
      <Tile name="Speed" value={`${number(Math.round(mean))} /s`} note={`${number(slots.generated_tokens)} tokens written so far`} />
      {accepted !== null && (
        <Tile name="Guesses right" value={percent(accepted)} note={steps && generated ? `${(generated / steps).toFixed(2)} tokens a step` : undefined} />
      )}
      {sharesBySource(samples.value).map(([source, right]) => (
        <Tile key={source} name={`Guesses of ${SOURCES[source] ?? source}`} value={percent(right)} note="right" />
      ))}
      {reused !== null && <Tile name="Prompts remembered" value={percent(reused)} note={`${number(slots.prompt_tokens)} prompt tokens read`} />}
      <Tile
        name="Context in use"
        value={slots.pool_tokens ? percent(used / slots.pool_tokens) : "0 %"}
        note={`${number(used)} of ${number(slots.pool_tokens)} tokens, ${number(slots.evictable_context_tokens)} can be given up`}
      />
      <Tile name="Kept states" value={number(slots.snapshots)} note={bytes(slots.snapshot_bytes)} />
      {memoryBytes.value !== null && <Tile name="Memory of the model" value={bytes(memoryBytes.value)} note="weights, context and work space" />}
      {hardware(samples.value).map((sample) => (
        <Tile
          key={sample.name + JSON.stringify(sample.labels)}
          name={named(sample.name)}
          value={number(Math.round(sample.value * 10) / 10)}
          note={Object.entries(sample.labels)
            .map((label) => label.join(" "))
            .join(", ")}
        />
      ))}
      <Tile name="Running for" value={duration(Math.max(0, Date.now() - now.started * 1000)).replace(/^(\d+) min.*/, (_, min: string) => since(Number(min)))} />
    </dl>
  );
}

/** A metric's name as words. */
function named(metric: string): string {
  const words = metric.replace(/^hearth_/, "").replace(/_/g, " ").replace(/\bgpu\b/, "GPU");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** Minutes as days, hours and minutes. */
function since(minutes: number): string {
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

const WIDTH = 600;
const HEIGHT = 120;
const POINTS = 120;

function Chart(): VNode {
  const values = rates.value;
  const most = Math.max(0, ...values);
  // A server that does nothing has a flat line at the bottom.
  const top = Math.max(10, most);
  const step = WIDTH / (POINTS - 1);
  const first = WIDTH - (values.length - 1) * step;
  const points = values.map((value, at) => `${(first + at * step).toFixed(1)},${(HEIGHT - (value / top) * (HEIGHT - 4)).toFixed(1)}`);
  const last = values.at(-1) ?? 0;
  return (
    <figure class="chart">
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`Now ${last} tokens a second, at most ${most}`}>
        {points.length > 1 && <polygon points={`${first.toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`} />}
        {points.length > 1 && <polyline points={points.join(" ")} />}
      </svg>
      <figcaption>
        <span>{number(most)} at most</span>
        <span>{number(last)} now</span>
      </figcaption>
    </figure>
  );
}

const STATES: Record<string, string> = { waiting: "waits", prefill: "reads the prompt", decode: "writes" };

function Requests({ list }: { list: RequestLine[] }): VNode {
  if (list.length === 0) return <p class="none">Nobody asks for anything right now.</p>;
  return (
    <div class="scroll" tabIndex={0} role="group" aria-label="Requests">
      <table>
        <thead>
          <tr>
            <th scope="col">Request</th>
            <th scope="col">State</th>
            <th scope="col">Session</th>
            <th scope="col">Priority</th>
            <th scope="col">Prompt</th>
            <th scope="col">Remembered</th>
            <th scope="col">Written</th>
            <th scope="col">Tokens a second</th>
            <th scope="col">Age</th>
          </tr>
        </thead>
        <tbody>
          {list.map((one) => (
            <tr key={one.id}>
              <td>{one.id}</td>
              <td>{STATES[one.state] ?? one.state}</td>
              <td>{one.session ?? ""}</td>
              <td>{one.priority}</td>
              <td>{number(one.prompt_tokens)}</td>
              <td>{number(one.cached_tokens)}</td>
              <td>
                {number(one.generated_tokens)} of {number(one.max_tokens)}
              </td>
              <td>{rateOf.value.get(one.id)?.toFixed(1) ?? ""}</td>
              <td>{one.age_s} s</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
