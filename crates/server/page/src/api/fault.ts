// What went wrong, as a kind that decides what the page offers and a sentence for people.

export type FaultKind = "key" | "unreachable" | "busy" | "loading" | "context" | "cut" | "refused" | "broken";

export class Fault extends Error {
  constructor(
    readonly kind: FaultKind,
    message: string,
    readonly retryAfterS: number | null = null,
  ) {
    super(message);
  }
}

interface ErrorBody {
  message?: unknown;
  code?: unknown;
  type?: unknown;
}

/** A sentence begins with a capital letter and has a full stop. */
export function sentence(text: string): string {
  const trimmed = text.trim();
  const begun = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(begun) ? begun : `${begun}.`;
}

/** The fault that an error object of the server stands for. */
export function faultOf(error: ErrorBody | null | undefined, status: number | null, retryAfterS: number | null = null): Fault {
  const said = typeof error?.message === "string" && error.message !== "" ? error.message : null;
  const code = typeof error?.code === "string" ? error.code : "";
  if (status === 401 || code === "invalid_api_key") {
    return new Fault("key", said ? sentence(said) : "This server needs an API key.");
  }
  if (code === "context_length_exceeded") {
    const advice = "Start a new chat, or edit an earlier message to make this one shorter.";
    return new Fault("context", `The conversation is longer than the model can read. ${said ? sentence(said) : ""} ${advice}`);
  }
  if (status === 429 || code === "queue_full") {
    return new Fault("busy", "The server has too many requests waiting. Try again in a moment.", retryAfterS);
  }
  if (status === 503) {
    return new Fault("loading", said ? sentence(said) : "The server is not ready yet.", retryAfterS);
  }
  if (said) return new Fault(status !== null && status >= 400 && status < 500 ? "refused" : "broken", sentence(said));
  return new Fault("broken", status === null ? "The server reported an error without a reason." : `The server answered with status ${status} and no reason.`);
}

/** The fault of a response that is not a success. */
export async function faultOfResponse(response: Response): Promise<Fault> {
  const after = Number(response.headers.get("retry-after"));
  const body: unknown = await response.json().catch(() => null);
  const error = (body as { error?: ErrorBody } | null)?.error;
  return faultOf(error, response.status, Number.isFinite(after) && after > 0 ? after : null);
}

/** The fault of anything that was thrown. */
export function faultFrom(thrown: unknown): Fault {
  if (thrown instanceof Fault) return thrown;
  if (nameOf(thrown) === "TypeError") {
    return new Fault("unreachable", "The server cannot be reached. Check that it runs and that the network is there.");
  }
  return new Fault("broken", sentence((thrown as { message?: string } | null)?.message ?? String(thrown)));
}

export function isAbort(thrown: unknown): boolean {
  return nameOf(thrown) === "AbortError";
}

/** Errors of the browser come in several classes; their names say what they are. */
function nameOf(thrown: unknown): string {
  return (thrown as { name?: string } | null)?.name ?? "";
}
