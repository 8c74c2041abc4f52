// The one bundle: as a module the widget in JupyterLab, whose model is anywidget's, with the traits
// that Python shares; in a page it defines twellOpen (page.js).

import "./page.js";
import { View } from "./view.js";

function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
