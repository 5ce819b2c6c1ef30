//! From a template's source to instructions, by way of minijinja's syntax tree.
//!
//! The tree is copied, and on the way operators whose result differs between Python and minijinja become calls of filters
//! that no template can name (`filters`): `+`, `*`, `%`, `~`, slices, and look-ups that may find a method. Literal text
//! becomes an expression, so that all output passes one formatter, which counts it; loops and macros start with a step of
//! the budget. What vLLM reads off the tree before it renders is read here too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use minijinja::{
    machinery::{
        ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt},
        CodeGenerator, Instructions, Span,
    },
    syntax::SyntaxConfig,
    Error, ErrorKind, Value,
};

use super::{filters, methods};

/// A template ready to run.
pub struct Program {
    // The instructions borrow from the source, which is therefore dropped last (fields drop in order) and never moves.
    pub main: Instructions<'static>,
    pub blocks: BTreeMap<&'static str, Instructions<'static>>,
    pub facts: Facts,
    #[allow(dead_code)] // owns what the instructions borrow
    source: Box<str>,
}

/// What the tree tells about the template.
#[derive(Default)]
pub struct Facts {
    /// Whether the template goes through the parts of a message's content: vLLM then hands it parts ("openai"), else text
    /// ("string").
    pub iterates_content: bool,
    /// Every variable that is read somewhere.
    pub variables: BTreeSet<String>,
    /// Whether the text of the template has the role "developer" in quotes.
    pub knows_developer: bool,
    pub uses_clock: bool,
}

/// Larger templates are refused. The largest known ones have 30 KB.
pub const MAX_SOURCE: usize = 1 << 20;

/// Compiles `source`.
pub fn compile(source: &str) -> Result<Program, Error> {
    if source.len() > MAX_SOURCE {
        return Err(Error::new(ErrorKind::SyntaxError, "the template is larger than 1 MiB"));
    }
    let normalized: Box<str> = super::scan::normalize(source).into();
    let mut syntax = SyntaxConfig::builder();
    // scan has taken the one newline at the end; a second one stays.
    let syntax = syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build()?;
    // SAFETY: the box's text lives in the Program, whose instructions are dropped before it and handed out by reference
    // to the Program only.
    let text: &'static str = unsafe { &*std::ptr::from_ref::<str>(&normalized) };
    let tree = minijinja::machinery::parse(text, "chat_template", syntax)?;
    let mut facts = Facts { knows_developer: source.contains("\"developer\"") || source.contains("'developer'"), ..Facts::default() };
    facts.iterates_content = iterates_content(&tree);
    let markup = ["safe", "escape", "|e", "| e", "Markup"].iter().any(|word| source.contains(word));
    let mut copier = Copier { facts, depth: 0, too_deep: false, literals: 0, most_literals: 0, markup };
    let copy = copier.stmt(&tree);
    if copier.too_deep {
        return Err(Error::new(ErrorKind::SyntaxError, "the template is nested too deeply"));
    }
    let mut generator = CodeGenerator::new("chat_template", text);
    generator.compile_stmt(&copy);
    let (main, blocks) = generator.finish();
    Ok(Program { main, blocks, facts: copier.facts, source: normalized })
}

/// Deeper trees are refused: minijinja looks for constants below each node, which takes the square of the depth.
const MAX_DEPTH: usize = 2000;

struct Copier {
    facts: Facts,
    depth: usize,
    too_deep: bool,
    /// How many list, tuple and dict literals are around the expression at hand, and the most that there were.
    literals: usize,
    most_literals: usize,
    /// Whether the template can make safe strings. Adding to those escapes, which minijinja does not do by itself.
    markup: bool,
}

fn constant<'s>(value: impl Into<Value>, span: Span) -> Expr<'s> {
    Expr::Const(Spanned::new(ast::Const { value: value.into() }, span))
}

fn filter<'s>(name: &'s str, on: Expr<'s>, args: Vec<Expr<'s>>, span: Span) -> Expr<'s> {
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Filter(Spanned::new(ast::Filter { name, expr: Some(on), args }, span))
}

fn const_str<'t>(expr: &'t Expr<'_>) -> Option<&'t str> {
    match expr {
        Expr::Const(c) => c.value.as_str(),
        _ => None,
    }
}

fn is_const(expr: &Expr<'_>) -> bool {
    matches!(expr, Expr::Const(_))
}

fn is_comparison(op: BinOpKind) -> bool {
    matches!(op, BinOpKind::Eq | BinOpKind::Ne | BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte)
}

/// An operand that will not send a comparison too deep.
fn guarded<'s>(expr: Expr<'s>) -> Expr<'s> {
    let span = expr.span();
    match &expr {
        Expr::Const(_) => expr,
        Expr::BinOp(_) | Expr::Filter(_) if is_string(&expr) => expr,
        _ => filter(filters::SHALLOW, expr, Vec::new(), span),
    }
}

/// A key of a dict: what Python cannot hash is none.
fn key<'s>(expr: Expr<'s>) -> Expr<'s> {
    let span = expr.span();
    match &expr {
        Expr::Const(_) => expr,
        _ => filter(filters::KEY, expr, Vec::new(), span),
    }
}

/// Whether an expression gives a string if it gives anything: what is added to it must be one too, and minijinja's own
/// operator serves.
fn is_string(expr: &Expr<'_>) -> bool {
    // Sums lean to the left. Not more than a few of their members are looked at, for each sum of a long one asks.
    let mut expr = expr;
    for _ in 0..32 {
        match expr {
            Expr::Const(c) => return c.value.as_str().is_some(),
            Expr::Filter(f) => return filters::returns_string(f.name),
            Expr::BinOp(b) => match (b.op, &b.right) {
                (BinOpKind::Concat, _) => return true,
                (BinOpKind::Add, Expr::Const(c)) if c.value.as_str().is_some() => return true,
                (BinOpKind::Add, Expr::Filter(f)) if filters::returns_string(f.name) => return true,
                (BinOpKind::Add, _) => expr = &b.left,
                _ => return false,
            },
            _ => return false,
        }
    }
    false
}

/// What of an exception's message is the template's own words: a constant, or the constant start of a sum.
fn own_words(expr: &Expr<'_>) -> String {
    match expr {
        Expr::Const(c) => c.value.as_str().unwrap_or_default().to_string(),
        Expr::BinOp(b) if matches!(b.op, BinOpKind::Add | BinOpKind::Concat | BinOpKind::Rem) => {
            let mut words = own_words(&b.left);
            if !words.is_empty() && !words.ends_with('…') {
                if matches!(b.op, BinOpKind::Rem) {
                    return words.split('%').next().unwrap_or_default().to_string() + "…";
                }
                match const_str(&b.right) {
                    Some(more) => words.push_str(more),
                    None => words.push('…'),
                }
            }
            words
        }
        Expr::Filter(f) if f.name == "format" => match &f.expr {
            Some(on) => own_words(on).split('%').next().unwrap_or_default().to_string() + "…",
            None => String::new(),
        },
        _ => String::new(),
    }
}

impl Copier {
    fn body<'s>(&mut self, body: &[Stmt<'s>]) -> Vec<Stmt<'s>> {
        body.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    /// A body that may run often: it starts with a step of the budget, which printing nothing takes.
    fn counted<'s>(&mut self, body: &[Stmt<'s>], span: Span) -> Vec<Stmt<'s>> {
        let mut out = Vec::with_capacity(body.len() + 1);
        out.push(Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: constant("", span) }, span)));
        out.extend(body.iter().map(|stmt| self.stmt(stmt)));
        out
    }

    fn stmt<'s>(&mut self, stmt: &Stmt<'s>) -> Stmt<'s> {
        self.depth += 1;
        let out = if self.depth > MAX_DEPTH {
            self.too_deep = true;
            Stmt::Break(Spanned::new(ast::Break, Span::default()))
        } else {
            self.copy_stmt(stmt)
        };
        self.depth -= 1;
        out
    }

    fn copy_stmt<'s>(&mut self, stmt: &Stmt<'s>) -> Stmt<'s> {
        match stmt {
            Stmt::Template(s) => {
                Stmt::Template(Spanned::new(ast::Template { children: self.body(&s.children) }, s.span()))
            }
            Stmt::EmitExpr(s) => Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: self.expr(&s.expr) }, s.span())),
            Stmt::EmitRaw(s) => {
                Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: constant(s.raw, s.span()) }, s.span()))
            }
            Stmt::ForLoop(s) => Stmt::ForLoop(Spanned::new(
                ast::ForLoop {
                    target: self.target(&s.target),
                    iter: self.iterated(&s.iter),
                    filter_expr: s.filter_expr.as_ref().map(|e| self.expr(e)),
                    recursive: s.recursive,
                    body: self.counted(&s.body, s.span()),
                    else_body: self.body(&s.else_body),
                },
                s.span(),
            )),
            Stmt::IfCond(s) => Stmt::IfCond(Spanned::new(
                ast::IfCond {
                    expr: self.expr(&s.expr),
                    true_body: self.body(&s.true_body),
                    false_body: self.body(&s.false_body),
                },
                s.span(),
            )),
            Stmt::WithBlock(s) => Stmt::WithBlock(Spanned::new(
                ast::WithBlock { assignments: self.assignments(&s.assignments, s.span()), body: self.body(&s.body) },
                s.span(),
            )),
            Stmt::Set(s) => Stmt::Set(Spanned::new(
                ast::Set { target: self.target(&s.target), expr: self.expr(&s.expr) },
                s.span(),
            )),
            Stmt::SetBlock(s) => Stmt::SetBlock(Spanned::new(
                ast::SetBlock {
                    target: self.target(&s.target),
                    filter: s.filter.as_ref().map(|e| self.expr(e)),
                    body: self.body(&s.body),
                },
                s.span(),
            )),
            Stmt::AutoEscape(s) => Stmt::AutoEscape(Spanned::new(
                ast::AutoEscape { enabled: self.expr(&s.enabled), body: self.body(&s.body) },
                s.span(),
            )),
            Stmt::FilterBlock(s) => Stmt::FilterBlock(Spanned::new(
                ast::FilterBlock {
                    filter: self.expr(&s.filter),
                    filter_span: s.filter_span,
                    body: self.body(&s.body),
                },
                s.span(),
            )),
            Stmt::Block(s) => Stmt::Block(Spanned::new(
                ast::Block { name: s.name, required: s.required, body: self.body(&s.body) },
                s.span(),
            )),
            Stmt::Import(s) => Stmt::Import(Spanned::new(
                ast::Import { expr: self.expr(&s.expr), name: self.target(&s.name) },
                s.span(),
            )),
            Stmt::FromImport(s) => Stmt::FromImport(Spanned::new(
                ast::FromImport {
                    expr: self.expr(&s.expr),
                    names: s.names.iter().map(|(n, a)| (self.target(n), a.as_ref().map(|a| self.target(a)))).collect(),
                },
                s.span(),
            )),
            Stmt::Extends(s) => Stmt::Extends(Spanned::new(ast::Extends { name: self.expr(&s.name) }, s.span())),
            Stmt::Include(s) => Stmt::Include(Spanned::new(
                ast::Include { name: self.expr(&s.name), ignore_missing: s.ignore_missing },
                s.span(),
            )),
            Stmt::Macro(s) => Stmt::Macro(self.macro_decl(s)),
            Stmt::CallBlock(s) => Stmt::CallBlock(Spanned::new(
                ast::CallBlock {
                    call: self.call(&s.call),
                    call_expr_span: s.call_expr_span,
                    macro_decl: self.macro_decl(&s.macro_decl),
                },
                s.span(),
            )),
            Stmt::Continue(s) => Stmt::Continue(Spanned::new(ast::Continue, s.span())),
            Stmt::Break(s) => Stmt::Break(Spanned::new(ast::Break, s.span())),
            Stmt::Do(s) => Stmt::Do(Spanned::new(ast::Do { call: self.call(&s.call) }, s.span())),
        }
    }

    /// The assignments of a with block. Jinja evaluates all of them before it assigns the first.
    fn assignments<'s>(&mut self, pairs: &[(Expr<'s>, Expr<'s>)], span: Span) -> Vec<(Expr<'s>, Expr<'s>)> {
        if pairs.len() < 2 {
            return pairs.iter().map(|(t, e)| (self.target(t), self.expr(e))).collect();
        }
        let targets = pairs.iter().map(|(t, _)| self.target(t)).collect();
        let values = pairs.iter().map(|(_, e)| self.expr(e)).collect();
        vec![(
            Expr::List(Spanned::new(ast::List { items: targets }, span)),
            Expr::List(Spanned::new(ast::List { items: values }, span)),
        )]
    }

    /// A macro. minijinja gives its arguments their defaults from the last to the first, Jinja from the first on: a default
    /// that is no constant moves into the body, where it sees the arguments before it.
    fn macro_decl<'s>(&mut self, s: &Spanned<ast::Macro<'s>>) -> Spanned<ast::Macro<'s>> {
        let span = s.span();
        let mut body = self.counted(&s.body, span);
        let first = s.args.len().saturating_sub(s.defaults.len());
        let mut moved = Vec::new();
        let mut defaults = Vec::with_capacity(s.defaults.len());
        for (arg, default) in s.args[first..].iter().zip(&s.defaults) {
            let default = self.expr(default);
            if default.as_const().is_some() {
                defaults.push(default);
                continue;
            }
            defaults.push(constant(Value::UNDEFINED, span));
            let missing = Expr::Test(Spanned::new(
                ast::Test { name: "undefined", expr: self.target(arg), args: Vec::new() },
                span,
            ));
            let set = Stmt::Set(Spanned::new(ast::Set { target: self.target(arg), expr: default }, span));
            moved.push(Stmt::IfCond(Spanned::new(
                ast::IfCond { expr: missing, true_body: vec![set], false_body: Vec::new() },
                span,
            )));
        }
        moved.append(&mut body);
        Spanned::new(
            ast::Macro { name: s.name, args: s.args.iter().map(|e| self.target(e)).collect(), defaults, body: moved },
            span,
        )
    }

    /// What is assigned to: it stays as it is.
    fn target<'s>(&mut self, expr: &Expr<'s>) -> Expr<'s> {
        match expr {
            Expr::Var(e) => Expr::Var(Spanned::new(ast::Var { id: e.id }, e.span())),
            Expr::GetAttr(e) => {
                Expr::GetAttr(Spanned::new(ast::GetAttr { expr: self.expr(&e.expr), name: e.name }, e.span()))
            }
            Expr::List(e) => Expr::List(Spanned::new(
                ast::List { items: e.items.iter().map(|e| self.target(e)).collect() },
                e.span(),
            )),
            Expr::Tuple(e) => Expr::Tuple(Spanned::new(
                ast::Tuple { items: e.items.iter().map(|e| self.target(e)).collect() },
                e.span(),
            )),
            other => self.expr(other),
        }
    }

    /// What a loop runs over. minijinja takes None for an empty list, Python does not.
    fn iterated<'s>(&mut self, expr: &Expr<'s>) -> Expr<'s> {
        let span = expr.span();
        match expr {
            Expr::List(_) | Expr::Tuple(_) | Expr::Slice(_) | Expr::Filter(_) => self.expr(expr),
            _ => filter(filters::ITERATE, self.expr(expr), Vec::new(), span),
        }
    }

    fn exprs<'s>(&mut self, exprs: &[Expr<'s>]) -> Vec<Expr<'s>> {
        exprs.iter().map(|e| self.expr(e)).collect()
    }

    fn args<'s>(&mut self, args: &[CallArg<'s>]) -> Vec<CallArg<'s>> {
        args.iter()
            .map(|arg| match arg {
                CallArg::Pos(e) => CallArg::Pos(self.expr(e)),
                CallArg::Kwarg(name, e) => CallArg::Kwarg(name, self.expr(e)),
                CallArg::PosSplat(e) => CallArg::PosSplat(self.expr(e)),
                CallArg::KwargSplat(e) => CallArg::KwargSplat(self.expr(e)),
            })
            .collect()
    }

    fn call<'s>(&mut self, call: &Spanned<ast::Call<'s>>) -> Spanned<ast::Call<'s>> {
        let mut args = self.args(&call.args);
        let callee = match &call.expr {
            // A method call keeps its form: minijinja knows it.
            Expr::GetAttr(e) => {
                if e.name == "changed" {
                    // loop.changed compares its arguments with those of the turn before.
                    args = args
                        .into_iter()
                        .map(|arg| match arg {
                            CallArg::Pos(e) => CallArg::Pos(guarded(e)),
                            other => other,
                        })
                        .collect();
                }
                Expr::GetAttr(Spanned::new(ast::GetAttr { expr: self.expr(&e.expr), name: e.name }, e.span()))
            }
            Expr::Var(e) => {
                match e.id {
                    "strftime_now" => self.facts.uses_clock = true,
                    "raise_exception" => {
                        // The message may quote the conversation. Beside it goes what of it the template wrote itself.
                        if let Some(CallArg::Pos(message)) = call.args.first() {
                            let words = own_words(message);
                            args.truncate(1);
                            args.push(CallArg::Pos(constant(words, call.span())));
                        }
                    }
                    _ => {}
                }
                self.expr(&call.expr)
            }
            other => self.expr(other),
        };
        Spanned::new(ast::Call { expr: callee, args }, call.span())
    }

    fn expr<'s>(&mut self, expr: &Expr<'s>) -> Expr<'s> {
        self.depth += 1;
        let out = if self.depth > MAX_DEPTH {
            self.too_deep = true;
            constant((), expr.span())
        } else {
            self.copy_expr(expr)
        };
        self.depth -= 1;
        out
    }

    fn copy_expr<'s>(&mut self, expr: &Expr<'s>) -> Expr<'s> {
        let span = expr.span();
        match expr {
            Expr::Var(e) => {
                if !self.facts.variables.contains(e.id) {
                    self.facts.variables.insert(e.id.to_string());
                }
                Expr::Var(Spanned::new(ast::Var { id: e.id }, span))
            }
            Expr::Const(e) => constant(e.value.clone(), span),
            Expr::Slice(e) => {
                let on = self.expr(&e.expr);
                let bounds = [&e.start, &e.stop, &e.step]
                    .into_iter()
                    .map(|b| b.as_ref().map_or_else(|| constant((), span), |e| self.expr(e)))
                    .collect();
                filter(filters::SLICE, on, bounds, span)
            }
            Expr::UnaryOp(e) => {
                #[allow(clippy::needless_match)] // it cannot be copied or cloned
                let op = match e.op {
                    ast::UnaryOpKind::Not => ast::UnaryOpKind::Not,
                    ast::UnaryOpKind::Neg => ast::UnaryOpKind::Neg,
                };
                Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr: self.expr(&e.expr) }, span))
            }
            Expr::BinOp(e) => {
                let name = match e.op {
                    BinOpKind::Add if self.markup || !(is_string(&e.left) || is_string(&e.right)) => Some(filters::ADD),
                    BinOpKind::Mul => Some(filters::MUL),
                    BinOpKind::Rem => Some(filters::REM),
                    BinOpKind::Concat => Some(filters::CONCAT),
                    _ => None,
                };
                let (left, mut right) = (self.expr(&e.left), self.expr(&e.right));
                if is_comparison(e.op) && !is_const(&left) {
                    right = guarded(right);
                }
                if matches!(e.op, BinOpKind::In) {
                    return filter(filters::IN, left, vec![right], span);
                }
                match name {
                    Some(name) => filter(name, left, vec![right], span),
                    None => Expr::BinOp(Spanned::new(ast::BinOp { op: e.op, left, right }, span)),
                }
            }
            Expr::Compare(e) => Expr::Compare(Spanned::new(
                ast::Compare {
                    expr: guarded(self.expr(&e.expr)),
                    ops: e.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: guarded(self.expr(&op.expr)) }).collect(),
                },
                span,
            )),
            Expr::IfExpr(e) => Expr::IfExpr(Spanned::new(
                ast::IfExpr {
                    test_expr: self.expr(&e.test_expr),
                    true_expr: self.expr(&e.true_expr),
                    false_expr: e.false_expr.as_ref().map(|e| self.expr(e)),
                },
                span,
            )),
            Expr::Filter(e) => Expr::Filter(Spanned::new(
                ast::Filter { name: e.name, expr: e.expr.as_ref().map(|e| self.expr(e)), args: self.args(&e.args) },
                span,
            )),
            Expr::Test(e) => Expr::Test(Spanned::new(
                ast::Test { name: e.name, expr: self.expr(&e.expr), args: self.args(&e.args) },
                span,
            )),
            Expr::GetAttr(e) => {
                let on = self.expr(&e.expr);
                if methods::is_method_name(e.name) {
                    return filter(filters::ATTR, on, vec![constant(e.name, span)], span);
                }
                Expr::GetAttr(Spanned::new(ast::GetAttr { expr: on, name: e.name }, span))
            }
            Expr::GetItem(e) => {
                let (on, key) = (self.expr(&e.expr), self.expr(&e.subscript_expr));
                let plain = match &key {
                    Expr::Const(c) => c.value.is_integer() || c.value.as_str().is_some_and(|s| !methods::is_method_name(s)),
                    _ => false,
                };
                if !plain {
                    return filter(filters::ITEM, on, vec![key], span);
                }
                Expr::GetItem(Spanned::new(ast::GetItem { expr: on, subscript_expr: key }, span))
            }
            Expr::Call(e) => Expr::Call(self.call(e)),
            Expr::List(_) | Expr::Tuple(_) | Expr::Map(_) if expr.as_const().is_none() => self.literal(expr),
            other => self.copy_literal(other),
        }
    }
}

impl Copier {
    /// A literal that is no constant: the outermost of nested ones pays for how much deeper it makes its values.
    fn literal<'s>(&mut self, expr: &Expr<'s>) -> Expr<'s> {
        self.literals += 1;
        self.most_literals = self.most_literals.max(self.literals);
        let copy = self.copy_literal(expr);
        self.literals -= 1;
        if self.literals > 0 {
            return copy;
        }
        let depth = std::mem::take(&mut self.most_literals);
        filter(filters::NEST, copy, vec![constant(depth as i64, expr.span())], expr.span())
    }

    fn copy_literal<'s>(&mut self, expr: &Expr<'s>) -> Expr<'s> {
        let span = expr.span();
        match expr {
            Expr::Tuple(e) => Expr::Tuple(Spanned::new(ast::Tuple { items: self.exprs(&e.items) }, span)),
            Expr::Map(e) => Expr::Map(Spanned::new(
                ast::Map {
                    keys: self.exprs(&e.keys).into_iter().map(key).collect(),
                    values: self.exprs(&e.values),
                },
                span,
            )),
            Expr::List(e) => Expr::List(Spanned::new(ast::List { items: self.exprs(&e.items) }, span)),
            _ => unreachable!("a literal"),
        }
    }
}

/// Assignments and loops of a tree, in the order of the text: all that [`iterates_content`] looks at.
#[derive(Default)]
struct Bindings<'t, 's> {
    sets: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
    loops: Vec<(&'t Expr<'s>, &'t Expr<'s>)>,
}

impl<'t, 's> Bindings<'t, 's> {
    fn collect(&mut self, body: &'t [Stmt<'s>]) {
        for stmt in body {
            match stmt {
                Stmt::Template(s) => self.collect(&s.children),
                Stmt::ForLoop(s) => {
                    self.loops.push((&s.target, &s.iter));
                    self.collect(&s.body);
                    self.collect(&s.else_body);
                }
                Stmt::IfCond(s) => {
                    self.collect(&s.true_body);
                    self.collect(&s.false_body);
                }
                Stmt::Set(s) => self.sets.push((&s.target, &s.expr)),
                Stmt::WithBlock(s) => self.collect(&s.body),
                Stmt::SetBlock(s) => self.collect(&s.body),
                Stmt::AutoEscape(s) => self.collect(&s.body),
                Stmt::FilterBlock(s) => self.collect(&s.body),
                Stmt::Block(s) => self.collect(&s.body),
                Stmt::Macro(s) => self.collect(&s.body),
                Stmt::CallBlock(s) => self.collect(&s.macro_decl.body),
                _ => {}
            }
        }
    }
}

fn is_var(expr: &Expr<'_>, name: &str) -> bool {
    matches!(expr, Expr::Var(v) if v.id == name)
}

/// Whether `expr` is the variable, or with `key` that attribute of it, maybe filtered, tested or sliced.
fn derives(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match expr {
        Expr::Filter(e) => e.expr.as_ref().is_some_and(|on| derives(on, name, key)),
        Expr::Test(e) => derives(&e.expr, name, key),
        Expr::Slice(e) => derives(&e.expr, name, key),
        Expr::GetItem(e) => {
            key.is_some_and(|key| is_var(&e.expr, name) && const_str(&e.subscript_expr) == Some(key))
        }
        Expr::GetAttr(e) => key.is_some_and(|key| is_var(&e.expr, name) && e.name == key),
        other => key.is_none() && is_var(other, name),
    }
}

fn target_name<'t>(expr: &'t Expr<'_>) -> Option<&'t str> {
    match expr {
        Expr::Var(v) => Some(v.id),
        _ => None,
    }
}

/// vLLM's rule: some loop runs over `message.content`, where `message` is what some loop over `messages` binds, and
/// `messages` may have been assigned to other names. Where a loop or assignment in question binds something else than one
/// name, vLLM's detection fails and it takes the template for one that wants strings.
fn iterates_content(tree: &Stmt<'_>) -> bool {
    let mut bindings = Bindings::default();
    bindings.collect(std::slice::from_ref(tree));
    detect(&bindings).unwrap_or(false)
}

fn detect(bindings: &Bindings<'_, '_>) -> Option<bool> {
    let mut lists = vec!["messages"];
    let mut queue = VecDeque::from(["messages"]);
    let mut steps = 0;
    while let Some(name) = queue.pop_front() {
        steps += 1;
        if steps > 1000 {
            // Assignments in a circle: vLLM itself would not come back from them.
            return None;
        }
        for (target, value) in &bindings.sets {
            if derives(value, name, None) {
                let bound = target_name(target)?;
                lists.push(bound);
                if bound != name {
                    queue.push_back(bound);
                }
            }
        }
    }
    let mut items = Vec::new();
    for (target, iter) in &bindings.loops {
        if lists.iter().any(|list| derives(iter, list, None)) {
            items.push(target_name(target)?);
        }
    }
    for (target, iter) in &bindings.loops {
        if items.iter().any(|item| derives(iter, item, Some("content"))) {
            target_name(target)?;
            return Some(true);
        }
    }
    Some(false)
}
