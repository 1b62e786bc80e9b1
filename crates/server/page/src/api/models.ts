// The models that the server offers, and what its defaults are.

import { computed, signal } from "@preact/signals";
import { faultFrom, type Fault } from "./fault.ts";
import { getJson } from "./server.ts";
import { settings } from "../state/settings.ts";

export interface Model {
  id: string;
  /** Absent while the model is not loaded. */
  context_length?: number;
  /** Servers with several models say what a model does: loaded, loading, unloaded. */
  state?: string;
}

export interface Properties {
  default_generation_settings?: Record<string, number | null>;
  reasoning?: { supported?: boolean; default?: boolean; supported_efforts?: string[] };
  budget_envelope?: { think_max_tokens?: number | null; default_max_tokens?: number | null };
  speculative?: { enabled?: boolean };
}

export const models = signal<Model[]>([]);
export const modelsFault = signal<Fault | null>(null);
export const properties = signal<Properties>({});

/** The model that answers the next question. */
export const model = computed<Model | null>(() => {
  const wanted = settings.value.model;
  return models.value.find((one) => one.id === wanted) ?? models.value[0] ?? null;
});

let timer: ReturnType<typeof setTimeout> | undefined;

/** Reads the list, and again while a model loads or the server is away. */
export async function loadModels(): Promise<void> {
  clearTimeout(timer);
  let again = 0;
  try {
    const list = await getJson<{ data: Model[] }>("v1/models");
    models.value = list.data;
    modelsFault.value = null;
    if (list.data[0]?.context_length === undefined) again = 2000;
    else properties.value = await getJson<Properties>("props").catch(() => ({}));
  } catch (thrown) {
    modelsFault.value = faultFrom(thrown);
    if (modelsFault.value.kind !== "key") again = 5000;
  }
  if (again > 0) timer = setTimeout(() => void loadModels(), again);
}
