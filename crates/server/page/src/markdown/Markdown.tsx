// A reply as elements. Each block is rendered once and again only when its source changes.

import { Component, Fragment, type ComponentChildren, type VNode } from "preact";
import { useRef } from "preact/hooks";
import { Blocks, type Block } from "./blocks.ts";
import { CodeBlock } from "./CodeBlock.tsx";
import { Formula } from "./Formula.tsx";
import { isSafeLink, type Token } from "./parser.ts";
import { LongTable } from "./LongTable.tsx";

export function Markdown({ text, isComplete }: { text: string; isComplete: boolean }): VNode {
  const blocks = useRef<Blocks | null>(null);
  blocks.current ??= new Blocks();
  const list = blocks.current.update(text, isComplete);
  return (
    <div class="markdown">
      {list.map((block, at) => (
        <BlockView key={at} block={block} />
      ))}
    </div>
  );
}

class BlockView extends Component<{ block: Block }> {
  override shouldComponentUpdate(next: { block: Block }): boolean {
    return next.block !== this.props.block;
  }
  override render(): ComponentChildren {
    const { tokens, depth } = this.props.block;
    return depth > 0 ? heading(tokens, depth) : elements(tokens);
  }
}

/** The tokens that are elements of their own name and nothing more. */
const PLAIN = new Set(["p", "blockquote", "ul", "ol", "li", "em", "strong", "s", "thead", "tbody", "tr"]);

/** The page has a heading of its own, and each message has one. */
const HEADINGS_ABOVE = 2;

function heading(tokens: Token[], depth: number): VNode {
  const Tag = `h${Math.min(6, depth + HEADINGS_ABOVE)}` as "h3";
  return <Tag class={`heading-${tokens[0]?.tag.slice(1)}`}>{elements(tokens.slice(1, -1))}</Tag>;
}

/** Elements of a token list whose opening and closing tokens match. */
function elements(tokens: Token[]): ComponentChildren[] {
  const made: ComponentChildren[] = [];
  for (let at = 0; at < tokens.length; at++) {
    const token = tokens[at] as Token;
    if (token.nesting !== 1) {
      made.push(leaf(token));
      continue;
    }
    let depth = 1;
    let end = at + 1;
    for (; end < tokens.length; end++) {
      depth += (tokens[end] as Token).nesting;
      if (depth === 0) break;
    }
    made.push(container(token, tokens.slice(at + 1, end)));
    at = end;
  }
  return made;
}

function container(token: Token, inside: Token[]): ComponentChildren {
  const children = (): ComponentChildren[] => elements(inside);
  // Tight lists have paragraphs that are not shown as such.
  if (token.hidden) return <Fragment>{children()}</Fragment>;
  if (token.type === "link_open") return link(token.attrGet("href") ?? "", children());
  if (token.type === "table_open") return table(inside);
  if (token.tag === "th" || token.tag === "td") {
    const align = /text-align:(left|right|center)/.exec(token.attrGet("style") ?? "")?.[1];
    const Cell = token.tag;
    return align ? <Cell class={`align-${align}`}>{children()}</Cell> : <Cell>{children()}</Cell>;
  }
  if (token.type === "ordered_list_open") return <ol start={Number(token.attrGet("start") ?? 1)}>{children()}</ol>;
  if (token.type === "list_item_open") return listItem(inside);
  if (PLAIN.has(token.tag)) {
    const Tag = token.tag as "p";
    return <Tag>{children()}</Tag>;
  }
  // A heading in a list or a quotation is no part of the outline.
  if (token.type === "heading_open") return <p class={`heading-${token.tag.slice(1)}`}>{children()}</p>;
  return <Fragment>{children()}</Fragment>;
}

function table(inside: Token[]): VNode {
  const at = inside.findIndex((token) => token.type === "tbody_open");
  const top = elements(at === -1 ? inside : inside.slice(0, at));
  const rows: ComponentChildren[] = at === -1 ? [] : elements(inside.slice(at + 1, -1));
  return <LongTable top={top} rows={rows} />;
}

/** `[ ]` and `[x]` at the start of an item are boxes. */
function listItem(inside: Token[]): VNode {
  const inline = inside[0]?.type === "paragraph_open" ? inside[1] : undefined;
  const first = inline?.children?.[0];
  const box = first?.type === "text" ? /^\[([ xX])\] /.exec(first.content) : null;
  if (!box || !inline || !first) return <li>{elements(inside)}</li>;
  const isDone = box[1] !== " ";
  const text = Object.assign(Object.create(Object.getPrototypeOf(first)), first, { content: first.content.slice(4) });
  const changed = Object.assign(Object.create(Object.getPrototypeOf(inline)), inline, {
    children: [text, ...(inline.children ?? []).slice(1)],
  });
  return (
    <li class="task">
      <span class={isDone ? "box done" : "box"} role="img" aria-label={isDone ? "done" : "open"} />
      {elements([inside[0] as Token, changed, ...inside.slice(2)])}
    </li>
  );
}

function link(address: string, children: ComponentChildren): ComponentChildren {
  if (!isSafeLink(address)) return <Fragment>{children}</Fragment>;
  return (
    <a href={address} target="_blank" rel="noopener noreferrer nofollow">
      {children}
    </a>
  );
}

function leaf(token: Token): ComponentChildren {
  switch (token.type) {
    case "inline":
      return <Fragment>{elements(token.children ?? [])}</Fragment>;
    case "fence":
    case "code_block":
      return <CodeBlock code={token.content.replace(/\n$/, "")} language={token.info.trim().split(/\s+/)[0] ?? ""} />;
    case "code_inline":
      return <code>{token.content}</code>;
    case "math_inline":
    case "math_block":
      return <Formula source={token.content} isBlock={token.type === "math_block"} />;
    case "hr":
      return <hr />;
    case "hardbreak":
    case "softbreak":
      return <br />;
    case "image":
      // A picture from elsewhere would tell its host that the reply was read: it is a link.
      return link(token.attrGet("src") ?? "", `Image: ${token.content || token.attrGet("src")}`);
    default:
      return token.content;
  }
}
