// Markdown of a reply that is still being written. Blocks that can no longer change are kept; only the text behind
// them is parsed again, so the cost of a token does not grow with the reply.

import { parse, type Environment, type Token } from "./parser.ts";

/** A paragraph, list, table or other block at the top level. An unchanged block is the same object. */
export interface Block {
  tokens: Token[];
  source: string;
  /** Of a heading: how many headings it stands below, itself included. */
  depth: number;
}

export class Blocks {
  private text = "";
  private isComplete = false;
  /** Blocks before `settledEnd` are final. */
  private settled: Block[] = [];
  private settledEnd = 0;
  private tail: Block[] = [];
  /** The levels of the headings that the end of the settled blocks stands below. */
  private outline: number[] = [];
  private environment: Environment = {};
  /** How many characters were parsed in all; tests hold it against the length. */
  parsed = 0;

  /** The blocks of `text`, which mostly is the text of the last call and more. */
  update(text: string, isComplete: boolean): Block[] {
    if (text !== this.text || isComplete !== this.isComplete) {
      // A link may name a target, and a formula an end, that came later: then the finished text is parsed as a whole.
      const looksBack = this.environment.references !== undefined || text.includes("\\[");
      if (!text.startsWith(this.text) || (isComplete && looksBack)) this.reset();
      this.parseTail(text);
      this.text = text;
      this.isComplete = isComplete;
    }
    return [...this.settled, ...this.tail];
  }

  private reset(): void {
    this.text = "";
    this.settled = [];
    this.settledEnd = 0;
    this.tail = [];
    this.outline = [];
    this.environment = {};
  }

  private parseTail(text: string): void {
    const source = text.slice(this.settledEnd);
    this.parsed += source.length;
    const groups = split(parse(source, this.environment), source);
    // A block is final once the block behind it has a whole line: only then is it known that the line
    // neither continues it nor makes something else of it.
    let final = 0;
    groups.forEach((group, at) => {
      if (at > 0 && source.indexOf("\n", group.start) !== -1) final = at;
    });
    const outline = [...this.outline];
    groups.forEach(({ block }, at) => {
      if (at === final) this.outline = [...outline];
      setDepth(block, outline);
    });
    this.settled.push(...groups.slice(0, final).map(({ block }) => block));
    const rest = groups.slice(final);
    this.settledEnd += final > 0 ? (rest[0]?.start ?? 0) : 0;
    const before = this.tail;
    this.tail = rest.map(({ block }) => before.find((old) => old.source === block.source && old.depth === block.depth) ?? block);
  }
}

/** Headings of a reply may leave out levels; on the page each stands one below the heading that it belongs to. */
function setDepth(block: Block, outline: number[]): void {
  const level = block.tokens[0]?.type === "heading_open" ? Number(block.tokens[0].tag.slice(1)) : 0;
  if (level === 0) return;
  while ((outline.at(-1) ?? 0) >= level) outline.pop();
  outline.push(level);
  block.depth = outline.length;
}

interface Group {
  block: Block;
  start: number;
}

/** Cuts tokens at the top level, with the place in `source` where each block starts. */
function split(tokens: Token[], source: string): Group[] {
  const lines = [0];
  for (let at = source.indexOf("\n"); at !== -1; at = source.indexOf("\n", at + 1)) lines.push(at + 1);
  const groups: Group[] = [];
  let first = 0;
  tokens.forEach((token, at) => {
    const closes = token.level === 0 && token.nesting !== 1;
    if (!closes) return;
    const map = tokens[first]?.map;
    const start = lines[map?.[0] ?? 0] ?? source.length;
    const end = lines[map?.[1] ?? lines.length] ?? source.length;
    groups.push({ block: { tokens: tokens.slice(first, at + 1), source: source.slice(start, end), depth: 0 }, start });
    first = at + 1;
  });
  return groups;
}
