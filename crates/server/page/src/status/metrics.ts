// The text of `/metrics` as numbers.

export interface Sample {
  name: string;
  labels: Record<string, string>;
  value: number;
}

export function parseMetrics(text: string): Sample[] {
  const samples: Sample[] = [];
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)/.exec(line);
    if (!found) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      if (name !== undefined && value !== undefined) labels[name] = value.replace(/\\(.)/g, "$1");
    }
    const value = Number(found[3]);
    if (!Number.isNaN(value)) samples.push({ name: found[1] ?? "", labels, value });
  }
  return samples;
}

/** The sum of all samples of a name, or null if there is none. */
export function total(samples: Sample[], name: string): number | null {
  const found = samples.filter((sample) => sample.name === name);
  return found.length === 0 ? null : found.reduce((sum, sample) => sum + sample.value, 0);
}

/** The share of right guesses of each source that has guessed. */
export function sharesBySource(samples: Sample[]): [string, number][] {
  const counts = (name: string): Map<string, number> =>
    new Map(samples.filter((sample) => sample.name === name).map((sample) => [sample.labels["source"] ?? "", sample.value]));
  const accepted = counts("hearth_draft_tokens_accepted_by_source_total");
  const drafted = [...counts("hearth_draft_tokens_by_source_total")].filter(([, all]) => all > 0);
  return drafted.map(([source, all]) => [source, (accepted.get(source) ?? 0) / all]);
}

/** The samples that tell of power or temperature, whatever a server calls them. */
export function hardware(samples: Sample[]): Sample[] {
  return samples.filter((sample) => /power|watt|temperature|gpu_util/.test(sample.name) && Number.isFinite(sample.value));
}
