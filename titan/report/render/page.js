// Pointing at an arm anywhere shows it everywhere; without this the page only does not do that.
(() => {
  const root = document.querySelector("main");
  const show = (event) => {
    const arm = event.target.closest("[data-arm]")?.dataset.arm;
    root.classList.toggle("seek", arm !== undefined);
    root.querySelectorAll("[data-arm]").forEach((it) => it.classList.toggle("on", it.dataset.arm === arm));
  };
  root.addEventListener("mouseover", show);
  root.addEventListener("mouseleave", show);
})();
