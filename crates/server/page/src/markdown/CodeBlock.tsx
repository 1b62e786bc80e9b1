// A block of code with its language, a copy button and colours.

import { h, type ComponentChildren, type VNode } from "preact";
import { useMemo } from "preact/hooks";
import { common, createLowlight } from "lowlight";
import { CopyButton } from "../view/CopyButton.tsx";

const lowlight = createLowlight(common);
/** Longer code is shown without colours: colouring it would hold up the page. */
const MOST_CHARACTERS = 50_000;

type Node = ReturnType<typeof lowlight.highlight>["children"][number];

/** The colour classes of a code's parts. */
function coloured(nodes: Node[]): ComponentChildren[] {
  return nodes.map((node) => {
    if (node.type === "text") return node.value;
    if (node.type !== "element") return null;
    const names = node.properties["className"];
    return h("span", { class: Array.isArray(names) ? names.join(" ") : "" }, coloured(node.children as Node[]));
  });
}

export function CodeBlock({ code, language }: { code: string; language: string }): VNode {
  const parts = useMemo(() => {
    if (!lowlight.registered(language) || code.length > MOST_CHARACTERS) return code;
    return coloured(lowlight.highlight(language, code).children);
  }, [code, language]);
  return (
    <figure class="code">
      <figcaption>
        <span>{language || "text"}</span>
        <CopyButton text={code} label="Copy code" />
      </figcaption>
      <pre tabIndex={0} aria-label={language ? `Code in ${language}` : "Code"} role="group">
        <code>{parts}</code>
      </pre>
    </figure>
  );
}
