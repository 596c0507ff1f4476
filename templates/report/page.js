(function () {
  "use strict";
  var doc = document, root = doc.documentElement, zh = doc.getElementById("zh"), en = doc.getElementById("en");
  var folds = [].slice.call(doc.querySelectorAll("details")), button = doc.getElementById("unfold");
  function recall(store, key) { try { return store().getItem(key); } catch (e) { return null; } }
  function keep(store, key, value) { try { store().setItem(key, value); } catch (e) { /* private mode */ } }
  function local() { return localStorage; }
  function session() { return sessionStorage; }

  function speak() { root.lang = zh.checked ? "zh-Hans" : "en"; }
  var wanted = recall(local, "rackwright-language") || (/^zh/i.test(navigator.language || "") ? "zh" : "en");
  (wanted === "zh" ? zh : en).checked = true;
  speak();
  [en, zh].forEach(function (box) {
    box.addEventListener("change", function () { speak(); keep(local, "rackwright-language", box.id); });
  });

  var place = "rackwright-open:" + location.pathname, open = {};
  try { open = JSON.parse(recall(session, place)) || {}; } catch (e) { open = {}; }
  folds.forEach(function (fold) {
    if (fold.id in open) { fold.open = open[fold.id]; }
  });
  function label() {
    if (button) { button.setAttribute("aria-pressed", String(folds.every(function (fold) { return fold.open; }))); }
  }
  doc.addEventListener("toggle", function (event) {
    open[event.target.id] = event.target.open;
    keep(session, place, JSON.stringify(open));
    label();
  }, true);
  if (button && folds.length) {
    button.hidden = false;
    label();
    button.addEventListener("click", function () {
      var all = folds.every(function (fold) { return fold.open; });
      folds.forEach(function (fold) { fold.open = !all; });
    });
  }

  function reveal() {
    var target = location.hash && doc.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) { return; }
    for (var node = target; node; node = node.parentElement) { if (node.tagName === "DETAILS") { node.open = true; } }
    var inner = target.querySelector("details");
    if (inner && target.tagName === "LI") { inner.open = true; }
    target.scrollIntoView();
  }
  addEventListener("hashchange", reveal);
  reveal();

  if (doc.querySelector("[data-live]")) { setTimeout(function () { location.reload(); }, 5000); }
})();
