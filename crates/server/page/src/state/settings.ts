// Settings of the page. A value that is not set is not sent: the server's default holds.

import { signal } from "@preact/signals";
import { read, write } from "./local.ts";

export interface Settings {
  theme: "system" | "light" | "dark";
  /** Instructions that a new conversation starts with. */
  system: string;
  /** The model to ask for; empty for the server's choice. */
  model: string;
  thinking: "" | "on" | "off";
  effort: string;
  thinkingBudget: number | null;
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  repetitionPenalty: number | null;
  presencePenalty: number | null;
  frequencyPenalty: number | null;
  maxTokens: number | null;
  seed: number | null;
  /** One stop text a line. */
  stop: string;
  /** Function tools as a JSON array, as the API takes them. */
  tools: string;
}

export const DEFAULTS: Settings = {
  theme: "system",
  system: "",
  model: "",
  thinking: "",
  effort: "",
  thinkingBudget: null,
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  repetitionPenalty: null,
  presencePenalty: null,
  frequencyPenalty: null,
  maxTokens: null,
  seed: null,
  stop: "",
  tools: "",
};

const NAME = "hearth.settings";

function stored(): Settings {
  try {
    const found: unknown = JSON.parse(read(NAME) ?? "{}");
    const settings = { ...DEFAULTS };
    if (typeof found !== "object" || found === null) return settings;
    for (const [key, value] of Object.entries(found)) {
      if (!(key in DEFAULTS)) continue;
      const expected = DEFAULTS[key as keyof Settings];
      const fits = expected === null ? value === null || Number.isFinite(value) : typeof value === "string";
      if (fits) Object.assign(settings, { [key]: value });
    }
    return settings;
  } catch {
    return { ...DEFAULTS };
  }
}

export const settings = signal<Settings>(stored());

export function set(fields: Partial<Settings>): void {
  settings.value = { ...settings.value, ...fields };
  write(NAME, JSON.stringify(settings.value));
  showTheme();
}

/** The colours follow the system unless one is chosen. */
export function showTheme(): void {
  const { theme } = settings.value;
  const root = document.documentElement;
  if (theme === "system") delete root.dataset["theme"];
  else root.dataset["theme"] = theme;
}

/** How many settings of the reply differ from the server's defaults. */
export function changedCount(current: Settings): number {
  const plain = ["theme", "system", "model"];
  const keys = Object.keys(DEFAULTS) as (keyof Settings)[];
  return keys.filter((key) => !plain.includes(key) && current[key] !== DEFAULTS[key]).length;
}
