/** An element with properties and children. */
export function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);
