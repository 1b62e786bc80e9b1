// Small values in the browser's own storage. A browser that refuses it keeps them until the page is closed.

const memory = new Map<string, string>();

function area(kind: "local" | "session"): Storage | null {
  try {
    return kind === "local" ? localStorage : sessionStorage;
  } catch {
    return null;
  }
}

export function read(key: string, kind: "local" | "session" = "local"): string | null {
  return area(kind)?.getItem(key) ?? memory.get(key) ?? null;
}

export function write(key: string, value: string | null, kind: "local" | "session" = "local"): void {
  try {
    memory.delete(key);
    if (value === null) area(kind)?.removeItem(key);
    else area(kind)?.setItem(key, value);
  } catch {
    // The space is used up or refused.
    if (value !== null) memory.set(key, value);
  }
}

/** The kept names that begin with `prefix`. */
export function keys(prefix: string): string[] {
  return Object.keys(area("local") ?? {}).filter((key) => key.startsWith(prefix));
}
