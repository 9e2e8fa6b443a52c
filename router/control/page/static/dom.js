// Small helpers to build and update elements. Names of clients and requests come from clients, so all text is set as
// text: nothing here parses HTML.

/** Return a new element with these properties and children. `data` sets data attributes; `aria-*` sets attributes. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(element.dataset, value);
    else if (name === "role" || name.startsWith("aria-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Set the text of an element unless it has that text, so that a selection in it stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make the children of `parent` show `items` in order. A child that shows an item already is updated and not replaced,
 * so that focus and hovering stay. `keyOf` names an item; `create` builds its element; `update` shows the item in it.
 */
export function reconcile(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = old.get(key) ?? create(item);
    old.delete(key);
    child.dataset.key = key;
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of old.values()) child.remove();
}

/**
 * Make the children of `parent` look like `children`. What is alike stays, so that focus, selections and scroll positions
 * do; elsewhere text and attributes are taken over, or nodes replaced. Elements must have no listeners of their own.
 */
export function become(parent, children) {
  const old = [...parent.childNodes];
  children.forEach((child, index) => {
    const before = old[index];
    if (before === undefined) parent.append(child);
    else if (before.nodeName !== child.nodeName) before.replaceWith(child);
    else if (before.nodeType === Node.TEXT_NODE) {
      if (before.data !== child.data) before.data = child.data;
    } else {
      for (const { name } of [...before.attributes]) if (!child.hasAttribute(name)) before.removeAttribute(name);
      for (const { name, value } of child.attributes) {
        if (before.getAttribute(name) === value) continue;
        if (name === "style") before.style.cssText = value; // as an attribute the page's policy forbids it
        else before.setAttribute(name, value);
      }
      become(before, [...child.childNodes]);
    }
  });
  for (const left of old.slice(children.length)) left.remove();
}

/** Return a link that opens the details of a client, worker or request. */
export function detailsLink(kind, name, text = name) {
  return el("a", { href: detailsHash(kind, name), textContent: text, title: name });
}

/** Return the part of the URL that opens these details. */
export function detailsHash(kind, name) {
  return `#${kind}=${encodeURIComponent(name)}`;
}
