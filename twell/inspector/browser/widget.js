// The widget in JupyterLab: the model is anywidget's, whose traits Python shares.

import { View } from "./view.js";

function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
