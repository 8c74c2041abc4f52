// Keys of the passage and its map, where the focus is on one of them; elsewhere they scroll.

export function pressed(event, side, state) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { side: own, layer } = state.selected();
  const token = state.standsFor(own, side) ? state.selected().token : null;
  const last = side.L - 1;
  const go = (to) => state.chooseToken(side, Math.max(0, Math.min(side.T - 1, to)));
  const climb = (by, begin) => {
    const to = layer === null ? begin : Math.max(0, Math.min(last, layer + by));
    state.choose(side, { layer: to, neuron: null });
  };
  const act = {
    ArrowRight: () => go(token === null ? 0 : token + 1),
    ArrowLeft: () => go(token === null ? side.T - 1 : token - 1),
    ArrowDown: () => climb(1, 0),
    ArrowUp: () => climb(-1, last),
    Home: () => go(0),
    End: () => go(side.T - 1),
    Enter: () => {
      const best = token !== null && layer !== null && side.strongest(layer, token, 1)[0];
      if (best) state.chooseNeuron(side, layer, best.neuron, { token });
    },
    Escape: () => state.letGo(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  event.stopPropagation();
  state.peek = null;
  act();
}
