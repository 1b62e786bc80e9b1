// Settings. An empty field is the server's default, which is shown in its place.

import { useSignal } from "@preact/signals";
import type { VNode } from "preact";
import { apiKey } from "../api/server.ts";
import { properties } from "../api/models.ts";
import { edit, heads, shown } from "../state/conversations.ts";
import { DEFAULTS, set, settings, type Settings } from "../state/settings.ts";
import { download, exportAll, importAll, markdown } from "../state/transfer.ts";
import { Dialog } from "./Dialog.tsx";
import { KeyForm } from "./KeyDialog.tsx";

type NumberName = { [K in keyof Settings]: Settings[K] extends number | null ? K : never }[keyof Settings];

interface Field {
  name: NumberName;
  label: string;
  hint: string;
  min: number;
  max?: number;
  step: number | "any";
  /** The name of the default in `/props`. */
  served?: string;
}

const FIELDS: Field[] = [
  { name: "temperature", label: "Temperature", hint: "0 always takes the likeliest word; higher is freer", min: 0, max: 2, step: "any", served: "temperature" },
  { name: "topP", label: "Top p", hint: "draws from the likeliest words that make up this share", min: 0, max: 1, step: "any", served: "top_p" },
  { name: "topK", label: "Top k", hint: "draws from this many words; 0 for all", min: 0, step: 1, served: "top_k" },
  { name: "minP", label: "Min p", hint: "leaves out words this much less likely than the best", min: 0, max: 1, step: "any", served: "min_p" },
  { name: "repetitionPenalty", label: "Repetition penalty", hint: "above 1 avoids words that were there", min: 0, step: "any", served: "repeat_penalty" },
  { name: "presencePenalty", label: "Presence penalty", hint: "avoids words that the reply has", min: -2, max: 2, step: "any", served: "presence_penalty" },
  { name: "frequencyPenalty", label: "Frequency penalty", hint: "avoids words the more often they came", min: -2, max: 2, step: "any" },
  { name: "maxTokens", label: "Longest reply", hint: "in tokens, thinking included", min: 1, step: 1, served: "n_predict" },
  { name: "seed", label: "Seed", hint: "the same seed draws the same words", min: 0, step: 1 },
];

export function SettingsDialog(): VNode {
  return (
    <Dialog title="Settings">
      <Instructions />
      <Thinking />
      <fieldset>
        <legend>Sampling</legend>
        <p class="hint">An empty field is the server's default.</p>
        <div class="grid">
          {FIELDS.map((field) => (
            <NumberField key={field.name} {...field} />
          ))}
        </div>
        <TextField name="stop" label="Stop texts, one a line" rows={2} />
      </fieldset>
      <details>
        <summary>Tools</summary>
        <TextField name="tools" label="Functions the model may call, as a JSON array" rows={5} isCode />
        <p class="hint">The page runs nothing: it shows the calls, and you give the results.</p>
      </details>
      <fieldset>
        <legend>This page</legend>
        <label>
          Colours
          <select value={settings.value.theme} onChange={(event) => set({ theme: event.currentTarget.value as Settings["theme"] })}>
            <option value="system">As the system</option>
            <option value="light">Light</option>
            <option value="dark">Dark</option>
          </select>
        </label>
        <details open={apiKey.value !== ""}>
          <summary>API key</summary>
          <KeyForm />
        </details>
      </fieldset>
      <Transfer />
      <div class="buttons">
        <button type="button" onClick={() => set({ ...DEFAULTS, theme: settings.value.theme, system: settings.value.system })}>
          Back to the server's defaults
        </button>
      </div>
    </Dialog>
  );
}

function Instructions(): VNode {
  return (
    <fieldset>
      <legend>System prompt</legend>
      <label>
        For this conversation
        <textarea
          rows={3}
          value={shown.value.system}
          placeholder="How the model should answer here"
          onInput={(event) => {
            const system = event.currentTarget.value;
            edit(shown.value.id, (conversation) => ({ ...conversation, system }));
          }}
        />
      </label>
      <TextField name="system" label="For new conversations" rows={2} />
    </fieldset>
  );
}

function Thinking(): VNode {
  const reasoning = properties.value.reasoning;
  const byDefault = reasoning?.default === undefined ? "Server's default" : `Server's default (${reasoning.default ? "on" : "off"})`;
  const efforts = (reasoning?.supported_efforts ?? ["low", "medium", "high"]).filter((effort) => effort !== "none");
  return (
    <fieldset>
      <legend>Thinking</legend>
      {reasoning?.supported === false && <p class="hint">This model does not think before it answers.</p>}
      <div class="grid">
        <label>
          Thinks before it answers
          <select value={settings.value.thinking} onChange={(event) => set({ thinking: event.currentTarget.value as Settings["thinking"] })}>
            <option value="">{byDefault}</option>
            <option value="on">On</option>
            <option value="off">Off</option>
          </select>
        </label>
        <label>
          Effort
          <select value={settings.value.effort} disabled={settings.value.thinking === "off"} onChange={(event) => set({ effort: event.currentTarget.value })}>
            <option value="">Server's default</option>
            {efforts.map((effort) => (
              <option key={effort} value={effort}>
                {effort}
              </option>
            ))}
          </select>
        </label>
        <NumberField name="thinkingBudget" label="Thinking limit" hint="in tokens" min={0} step={1} />
      </div>
    </fieldset>
  );
}

function NumberField({ name, label, hint, min, max, step, served }: Field): VNode {
  const value = settings.value[name];
  const known = served ? properties.value.default_generation_settings?.[served] : undefined;
  // The server's numbers are f32: 0.95 arrives as such, others may have a long tail.
  const placeholder = typeof known === "number" ? String(Number(known.toPrecision(6))) : "default";
  const id = `setting-${name}`;
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="number"
        aria-describedby={`${id}-hint`}
        min={min}
        max={max}
        step={step}
        placeholder={placeholder}
        value={value ?? ""}
        onChange={(event) => {
          const input = event.currentTarget;
          if (!input.checkValidity()) {
            input.reportValidity();
            return;
          }
          set({ [name]: input.value === "" ? null : Number(input.value) });
        }}
      />
      <span class="hint" id={`${id}-hint`}>
        {hint}
      </span>
    </div>
  );
}

function TextField({ name, label, rows, isCode }: { name: "stop" | "tools" | "system"; label: string; rows: number; isCode?: boolean }): VNode {
  return (
    <label>
      {label}
      <textarea class={isCode ? "code-text" : ""} rows={rows} value={settings.value[name]} spellcheck={!isCode} onInput={(event) => set({ [name]: event.currentTarget.value })} />
    </label>
  );
}

function Transfer(): VNode {
  const said = useSignal("");
  const take = async (file: File | undefined): Promise<void> => {
    if (!file) return;
    try {
      const taken = await importAll(await file.text());
      said.value = `${taken} ${taken === 1 ? "conversation" : "conversations"} taken in.`;
    } catch (thrown) {
      said.value = (thrown as Error).message;
    }
  };
  const day = new Date().toISOString().slice(0, 10);
  return (
    <fieldset>
      <legend>Conversations</legend>
      <p class="hint">They are kept in this browser only. Take them out to keep or to move them.</p>
      <div class="buttons start">
        <button type="button" disabled={heads.value.length === 0} onClick={() => void exportAll().then((text) => download(`hearth-${day}.json`, "application/json", text))}>
          Export all
        </button>
        <button type="button" disabled={Object.keys(shown.value.messages).length === 0} onClick={() => download(`${fileName(shown.value.title)}.md`, "text/markdown", markdown(shown.value))}>
          This one as Markdown
        </button>
        <label class="button">
          Import
          <input
            class="unseen"
            type="file"
            accept="application/json,.json"
            onChange={(event) => {
              void take(event.currentTarget.files?.[0]);
              event.currentTarget.value = "";
            }}
          />
        </label>
      </div>
      <p role="status">{said.value}</p>
    </fieldset>
  );
}

function fileName(title: string): string {
  return title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "chat";
}
