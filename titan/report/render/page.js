// Pointing at a variant highlights it everywhere on the page.
(() => {
  const root = document.querySelector("main");
  const show = (event) => {
    const variant = event.target.closest("[data-variant]")?.dataset.variant;
    root.classList.toggle("seek", variant !== undefined);
    root.querySelectorAll("[data-variant]").forEach((it) => it.classList.toggle("on", it.dataset.variant === variant));
  };
  root.addEventListener("mouseover", show);
  root.addEventListener("mouseleave", show);
})();
