//! Compiles a template so that every operation whose result can grow passes through a bound.
//!
//! minijinja bounds the steps of a rendering but not what one step allocates. The syntax tree is
//! therefore rebuilt with internal filters (see [`super::limits`]) around concatenation,
//! repetition, literals of containers, calls, filters and namespace assignments. Text outside tags
//! becomes an expression, since only expressions pass through the formatter.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;

use minijinja::machinery::ast::{self, BinOpKind, Expr, Spanned, Stmt};
use minijinja::machinery::{CodeGenerator, Instructions, Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;

use super::limits::bound;
use crate::error::ChatError;

/// The longest source in bytes. The longest published chat template has about 20,000.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Maximum number of tokens of one tag. The parser recurses over operators, so that they bound its
/// stack.
const MAX_TAG_TOKENS: usize = 4_000;
/// Maximum number of `elif` of one template; the parser recurses over them.
const MAX_ELIFS: usize = 2_000;
/// The stack for compiling: the deepest syntax tree times the largest frames.
const COMPILE_STACK_BYTES: usize = 256 << 20;
/// The name of the one template, shown in errors.
const NAME: &str = "chat";

/// The instructions of a template.
#[derive(Debug)]
pub(super) struct BoundedProgram {
    pub(super) instructions: Instructions<'static>,
    pub(super) blocks: BTreeMap<&'static str, Instructions<'static>>,
}

/// Compiles `source`; fails with [`ErrorKind::Setup`](crate::ErrorKind::Setup) if it is malformed,
/// too large, or includes other templates.
pub(super) fn compile(source: &str, syntax: &SyntaxConfig) -> Result<BoundedProgram, ChatError> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(ChatError::setup(format!(
            "the chat template has {} bytes; at most {MAX_SOURCE_BYTES} are taken",
            source.len()
        )));
    }
    check_tags(source, syntax)?;
    let source = interned(source);
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(COMPILE_STACK_BYTES)
            .spawn_scoped(scope, || generate(source, syntax))
            .map_err(|err| ChatError::setup(format!("no thread for the chat template: {err}")))?
            .join()
            .map_err(|_| ChatError::setup("the chat template does not compile"))?
    })
}

fn generate(source: &'static str, syntax: &SyntaxConfig) -> Result<BoundedProgram, ChatError> {
    let tree = parse(source, NAME, syntax.clone()).map_err(|err| malformed(&err))?;
    let tree = statement(&tree)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    Ok(BoundedProgram {
        instructions,
        blocks,
    })
}

fn malformed(err: &minijinja::Error) -> ChatError {
    ChatError::setup(format!("the chat template does not compile: {err}"))
}

/// One copy of each source, kept for the life of the process: instructions borrow from it.
fn interned(source: &str) -> &'static str {
    static SOURCES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    let mut sources = SOURCES
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let sources = sources.get_or_insert_default();
    if let Some(known) = sources.get(source) {
        return known;
    }
    let kept: &'static str = Box::leak(source.into());
    sources.insert(kept);
    kept
}

/// Refuses tags so long that the recursive parser would need an unbounded stack.
fn check_tags(source: &str, syntax: &SyntaxConfig) -> Result<(), ChatError> {
    let mut n_tokens = 0;
    let mut n_elifs = 0;
    for token in tokenize(source, false, syntax.clone()) {
        let (token, span) = token.map_err(|err| malformed(&err))?;
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => n_tokens = 0,
            Token::Ident("elif") => n_elifs += 1,
            _ => {}
        }
        n_tokens += 1;
        if n_tokens > MAX_TAG_TOKENS || n_elifs > MAX_ELIFS {
            return Err(ChatError::setup(format!(
                "the chat template is too complex at line {}: at most {MAX_TAG_TOKENS} tokens in a tag and {MAX_ELIFS} elif are taken",
                span.start_line
            )));
        }
    }
    Ok(())
}

type Built<T> = Result<T, ChatError>;

fn statements(list: &[Stmt<'static>]) -> Built<Vec<Stmt<'static>>> {
    list.iter().map(statement).collect()
}

fn statement(stmt: &Stmt<'static>) -> Built<Stmt<'static>> {
    Ok(match stmt {
        Stmt::Template(node) => {
            let children = statements(&node.children)?;
            Stmt::Template(Spanned::new(ast::Template { children }, node.span()))
        }
        Stmt::EmitRaw(node) => {
            let text = constant(Value::from(node.raw), node.span());
            emit(text, node.span())
        }
        Stmt::EmitExpr(node) => {
            let expr = match &node.expr {
                // The generator knows `loop(...)` and blocks by this form.
                Expr::Call(inner) => Expr::Call(call(inner)?),
                other => expression(other)?,
            };
            emit(expr, node.span())
        }
        Stmt::ForLoop(node) => {
            let node_copy = ast::ForLoop {
                target: target(&node.target)?,
                iter: expression(&node.iter)?,
                filter_expr: node.filter_expr.as_ref().map(expression).transpose()?,
                recursive: node.recursive,
                body: statements(&node.body)?,
                else_body: statements(&node.else_body)?,
            };
            Stmt::ForLoop(Spanned::new(node_copy, node.span()))
        }
        Stmt::IfCond(node) => {
            let node_copy = ast::IfCond {
                expr: expression(&node.expr)?,
                true_body: statements(&node.true_body)?,
                false_body: statements(&node.false_body)?,
            };
            Stmt::IfCond(Spanned::new(node_copy, node.span()))
        }
        Stmt::WithBlock(node) => {
            let assignments = node
                .assignments
                .iter()
                .map(|(name, value)| Ok((target(name)?, expression(value)?)))
                .collect::<Built<_>>()?;
            let body = statements(&node.body)?;
            Stmt::WithBlock(Spanned::new(
                ast::WithBlock { assignments, body },
                node.span(),
            ))
        }
        Stmt::Set(node) => {
            let value = expression(&node.expr)?;
            // Only a namespace has attributes that can be set.
            let expr = if matches!(node.target, Expr::GetAttr(_)) {
                filtered(bound::ATTRIBUTE, value, node.span())
            } else {
                value
            };
            let target = target(&node.target)?;
            Stmt::Set(Spanned::new(ast::Set { target, expr }, node.span()))
        }
        Stmt::SetBlock(node) => {
            let node_copy = ast::SetBlock {
                target: target(&node.target)?,
                filter: node.filter.as_ref().map(expression).transpose()?,
                body: statements(&node.body)?,
            };
            Stmt::SetBlock(Spanned::new(node_copy, node.span()))
        }
        Stmt::AutoEscape(node) => {
            let enabled = expression(&node.enabled)?;
            let body = statements(&node.body)?;
            Stmt::AutoEscape(Spanned::new(ast::AutoEscape { enabled, body }, node.span()))
        }
        Stmt::FilterBlock(node) => {
            let filter = expression(&node.filter)?;
            let body = statements(&node.body)?;
            Stmt::FilterBlock(Spanned::new(ast::FilterBlock { filter, body }, node.span()))
        }
        Stmt::Macro(node) => Stmt::Macro(macro_of(node)?),
        Stmt::CallBlock(node) => {
            let node_copy = ast::CallBlock {
                call: call(&node.call)?,
                macro_decl: macro_of(&node.macro_decl)?,
            };
            Stmt::CallBlock(Spanned::new(node_copy, node.span()))
        }
        Stmt::Continue(node) => Stmt::Continue(Spanned::new(ast::Continue, node.span())),
        Stmt::Break(node) => Stmt::Break(Spanned::new(ast::Break, node.span())),
        Stmt::Do(node) => {
            let call = call(&node.call)?;
            Stmt::Do(Spanned::new(ast::Do { call }, node.span()))
        }
        Stmt::Block(node) => return Err(foreign("block", node.span())),
        Stmt::Import(node) => return Err(foreign("import", node.span())),
        Stmt::FromImport(node) => return Err(foreign("from", node.span())),
        Stmt::Extends(node) => return Err(foreign("extends", node.span())),
        Stmt::Include(node) => return Err(foreign("include", node.span())),
    })
}

/// A chat template is one file: there is nothing to include or to extend.
fn foreign(tag: &str, span: Span) -> ChatError {
    ChatError::setup(format!(
        "the chat template uses {{% {tag} %}} at line {}, which is for several templates",
        span.start_line
    ))
}

fn emit(expr: Expr<'static>, span: Span) -> Stmt<'static> {
    Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr }, span))
}

fn macro_of(node: &Spanned<ast::Macro<'static>>) -> Built<Spanned<ast::Macro<'static>>> {
    let node_copy = ast::Macro {
        name: node.name,
        args: node.args.iter().map(target).collect::<Built<_>>()?,
        defaults: node.defaults.iter().map(expression).collect::<Built<_>>()?,
        body: statements(&node.body)?,
    };
    Ok(Spanned::new(node_copy, node.span()))
}

/// What an assignment assigns to; it has no value that could grow.
fn target(expr: &Expr<'static>) -> Built<Expr<'static>> {
    match expr {
        Expr::List(node) => {
            let items = node.items.iter().map(target).collect::<Built<_>>()?;
            Ok(Expr::List(Spanned::new(ast::List { items }, node.span())))
        }
        Expr::Tuple(node) => {
            let items = node.items.iter().map(target).collect::<Built<_>>()?;
            Ok(Expr::Tuple(Spanned::new(ast::Tuple { items }, node.span())))
        }
        other => expression(other),
    }
}

fn constant(value: Value, span: Span) -> Expr<'static> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

/// `expr | name`.
fn filtered(name: &'static str, expr: Expr<'static>, span: Span) -> Expr<'static> {
    let filter = ast::Filter {
        name,
        expr: Some(expr),
        args: Vec::new(),
    };
    Expr::Filter(Spanned::new(filter, span))
}

fn expressions(list: &[Expr<'static>]) -> Built<Vec<Expr<'static>>> {
    list.iter().map(expression).collect()
}

fn expression(expr: &Expr<'static>) -> Built<Expr<'static>> {
    let span = expr.span();
    Ok(match expr {
        Expr::Var(node) => Expr::Var(Spanned::new(ast::Var { id: node.id }, span)),
        Expr::Const(node) => constant(node.value.clone(), span),
        Expr::Slice(node) => {
            let part = |part: &Option<Expr<'static>>| part.as_ref().map(expression).transpose();
            let slice = ast::Slice {
                expr: expression(&node.expr)?,
                start: part(&node.start)?,
                stop: part(&node.stop)?,
                step: part(&node.step)?,
            };
            let slice = Expr::Slice(Spanned::new(slice, span));
            filtered(bound::WHOLE, slice, span)
        }
        Expr::UnaryOp(node) => {
            #[expect(clippy::needless_match, reason = "the kind is not `Copy`")]
            let op = match node.op {
                ast::UnaryOpKind::Not => ast::UnaryOpKind::Not,
                ast::UnaryOpKind::Neg => ast::UnaryOpKind::Neg,
            };
            let expr = expression(&node.expr)?;
            Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr }, span))
        }
        Expr::BinOp(node) => binary(node)?,
        Expr::Compare(node) => {
            let ops = node
                .ops
                .iter()
                .map(|one| {
                    let expr = expression(&one.expr)?;
                    Ok(ast::CompareOp { op: one.op, expr })
                })
                .collect::<Built<_>>()?;
            let expr = expression(&node.expr)?;
            let compare = Expr::Compare(Spanned::new(ast::Compare { expr, ops }, span));
            filtered(bound::TIME, compare, span)
        }
        Expr::IfExpr(node) => {
            let choice = ast::IfExpr {
                test_expr: expression(&node.test_expr)?,
                true_expr: expression(&node.true_expr)?,
                false_expr: node.false_expr.as_ref().map(expression).transpose()?,
            };
            Expr::IfExpr(Spanned::new(choice, span))
        }
        Expr::Filter(node) => filter(node)?,
        Expr::Test(node) => {
            let test = ast::Test {
                name: node.name,
                expr: expression(&node.expr)?,
                args: arguments(&node.args)?,
            };
            filtered(bound::TIME, Expr::Test(Spanned::new(test, span)), span)
        }
        Expr::GetAttr(node) => {
            let (expr, name) = (expression(&node.expr)?, node.name);
            Expr::GetAttr(Spanned::new(ast::GetAttr { expr, name }, span))
        }
        Expr::GetItem(node) => {
            let item = ast::GetItem {
                expr: expression(&node.expr)?,
                subscript_expr: expression(&node.subscript_expr)?,
            };
            filtered(bound::TIME, Expr::GetItem(Spanned::new(item, span)), span)
        }
        // A range holds no items; whatever collects them is counted.
        Expr::Call(node) if is_range(node) => Expr::Call(call(node)?),
        Expr::Call(node) => filtered(bound::WHOLE, Expr::Call(call(node)?), span),
        Expr::List(node) => {
            let items = expressions(&node.items)?;
            let list = Expr::List(Spanned::new(ast::List { items }, span));
            filtered(bound::WHOLE, list, span)
        }
        Expr::Tuple(node) => {
            let items = expressions(&node.items)?;
            let tuple = Expr::Tuple(Spanned::new(ast::Tuple { items }, span));
            filtered(bound::WHOLE, tuple, span)
        }
        Expr::Map(node) => {
            let (keys, values) = (expressions(&node.keys)?, expressions(&node.values)?);
            let map = Expr::Map(Spanned::new(ast::Map { keys, values }, span));
            filtered(bound::WHOLE, map, span)
        }
    })
}

fn binary(node: &Spanned<ast::BinOp<'static>>) -> Built<Expr<'static>> {
    let span = node.span();
    let (left, right) = (expression(&node.left)?, expression(&node.right)?);
    // A filter around an operand also keeps the generator from evaluating constants unbounded.
    let (left, right, result) = match node.op {
        BinOpKind::Concat => (
            filtered(bound::TEXT, left, span),
            filtered(bound::TEXT, right, span),
            Some(bound::LENGTH),
        ),
        // The left operand was counted when it was made.
        BinOpKind::Add => (
            filtered(bound::LENGTH, left, span),
            filtered(bound::WHOLE, right, span),
            Some(bound::LENGTH),
        ),
        BinOpKind::Mul => (
            filtered(bound::LENGTH, left, span),
            filtered(bound::LENGTH, right, span),
            Some(bound::WHOLE),
        ),
        BinOpKind::ScAnd | BinOpKind::ScOr => (left, right, None),
        _ => (left, right, Some(bound::TIME)),
    };
    let op = node.op;
    let binary = Expr::BinOp(Spanned::new(ast::BinOp { op, left, right }, span));
    Ok(match result {
        Some(name) => filtered(name, binary, span),
        None => binary,
    })
}

fn filter(node: &Spanned<ast::Filter<'static>>) -> Built<Expr<'static>> {
    let span = node.span();
    let operand = node.expr.as_ref().map(expression).transpose()?;
    let expr = operand.map(|operand| match bound::of_operand(node.name) {
        Some(name) => filtered(name, operand, span),
        None => operand,
    });
    let filter = ast::Filter {
        name: node.name,
        expr,
        args: arguments(&node.args)?,
    };
    let filter = Expr::Filter(Spanned::new(filter, span));
    Ok(filtered(bound::WHOLE, filter, span))
}

fn call(node: &Spanned<ast::Call<'static>>) -> Built<Spanned<ast::Call<'static>>> {
    let expr = expression(&node.expr)?;
    let args = arguments(&node.args)?;
    Ok(Spanned::new(ast::Call { expr, args }, node.span()))
}

fn is_range(node: &Spanned<ast::Call<'static>>) -> bool {
    matches!(&node.expr, Expr::Var(name) if name.id == "range")
}

fn arguments(args: &[ast::CallArg<'static>]) -> Built<Vec<ast::CallArg<'static>>> {
    args.iter()
        .map(|arg| {
            Ok(match arg {
                ast::CallArg::Pos(expr) => ast::CallArg::Pos(expression(expr)?),
                ast::CallArg::Kwarg(name, expr) => ast::CallArg::Kwarg(name, expression(expr)?),
                ast::CallArg::PosSplat(expr) => ast::CallArg::PosSplat(expression(expr)?),
                ast::CallArg::KwargSplat(expr) => ast::CallArg::KwargSplat(expression(expr)?),
            })
        })
        .collect()
}
