// Elements of the page. Text only ever enters as text nodes: nothing here reads a string as markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** An HTML element with attributes and children; a child that is no node becomes text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}
