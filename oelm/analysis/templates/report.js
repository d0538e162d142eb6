// Draws the charts when they come into view, and keeps them in step: an arm hidden in one is hidden
// in all, a step pointed at in one is marked in all.
(function () {
  "use strict";
  const page = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const views = new Map();
  const hidden = new Set();
  let cursor = null;

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = sessionStorage.getItem("oelm-theme"); } catch (e) { /* storage may be off */ }
  const dark = () => (chosen ? chosen === "dark" : system.matches);

  function look() {
    const ink = dark() ? "#c9ced6" : "#3C4149", line = dark() ? "#343a44" : "#E4E6EA", edge = dark() ? "#6b727d" : "#9AA0A8";
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: "transparent", font: font, view: { stroke: null },
      axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: edge, tickColor: edge },
      legend: { labelColor: ink, titleColor: ink }, header: { labelColor: ink, titleColor: ink }, text: { color: ink },
    };
  }

  function fit(spec, width) {
    const copy = JSON.parse(JSON.stringify(spec));
    delete copy.config.font;
    for (const part of ["axis", "header", "legend", "text"]) {
      for (const key of Object.keys(copy.config[part] || {})) {
        if (/color$/i.test(key)) delete copy.config[part][key];
      }
    }
    if (copy.facet) {
      const columns = Math.max(1, Math.min(3, Math.floor((width - 90) / (copy.spec.width + 25))));
      copy.columns = columns;
      return copy;
    }
    const wide = width > 560;
    if (!wide && copy.layer) copy.layer = copy.layer.filter((l) => l.name !== "wide-only");
    if (!wide) for (const l of copy.layer || []) {
      const axis = l.encoding && l.encoding.y && l.encoding.y.axis;
      if (axis && axis.labelLimit) axis.labelLimit = Math.min(axis.labelLimit, Math.round(width * 0.36));
    }
    copy.width = Math.max(220, width);
    copy.autosize = { type: "fit-x", contains: "padding" };
    copy.padding = { left: 2, right: 8, top: 6, bottom: 4 };
    return copy;
  }

  async function draw(place) {
    const id = place.dataset.chart, width = place.clientWidth;
    const options = { mode: "vega-lite", actions: false, renderer: "svg", ast: true, config: look(), tooltip: { theme: dark() ? "dark" : "light" } };
    const old = views.get(id);
    const made = await window.vegaEmbed(place, fit(page.charts[id], width), options);
    if (old) old.finalize();
    place.classList.add("drawn");
    place.dataset.width = width;
    views.set(id, made);
    const names = Object.keys(made.view.getState().signals || {});
    if (names.includes("hidden")) made.view.signal("hidden", [...hidden]).run();
    if (names.includes("at")) made.view.addSignalListener("at", (_, value) => point(value && value.step ? value.step[0] : null));
  }

  function tell(name, value) {
    for (const made of views.values()) {
      try { made.view.signal(name, value).run(); } catch (e) { /* this chart has no such parameter */ }
    }
  }

  function point(step) {
    if (step === cursor) return;
    cursor = step;
    window.requestAnimationFrame(() => tell("pointed", cursor));
  }

  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const arm = page.arms[Number(chip.dataset.arm)];
      if (hidden.has(arm)) hidden.delete(arm); else hidden.add(arm);
      chip.setAttribute("aria-pressed", String(!hidden.has(arm)));
      tell("hidden", [...hidden]);
    });
  }

  const places = [...document.querySelectorAll(".chart")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !views.has(entry.target.dataset.chart)) {
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "800px 0px" });
  places.forEach((place) => seen.observe(place));

  function repaint() {
    root.dataset.theme = dark() ? "dark" : "light";
    for (const place of places) if (views.has(place.dataset.chart)) draw(place);
  }
  root.dataset.theme = dark() ? "dark" : "light";
  system.addEventListener("change", repaint);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    try { sessionStorage.setItem("oelm-theme", chosen); } catch (e) { /* storage may be off */ }
    repaint();
  });
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const place of places) if (views.has(place.dataset.chart) && Math.abs(place.clientWidth - place.dataset.width) > 12) draw(place);
    }, 150);
  });

  if (page.reload) {
    try {
      const at = sessionStorage.getItem("oelm-scroll");
      if (at) window.scrollTo(0, Number(at));
    } catch (e) { /* storage may be off */ }
    setTimeout(() => {
      try { sessionStorage.setItem("oelm-scroll", String(window.scrollY)); } catch (e) { /* as above */ }
      window.location.reload();
    }, page.reload * 1000);
  }
})();
