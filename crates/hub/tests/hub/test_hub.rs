//! A hub on loopback with the interface of the real one, a second server in the role of its
//! content network, and faults on request.

#![allow(
    dead_code,
    reason = "each test crate that includes this file uses a part of it"
)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::StreamExt;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// The commit of every repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The token of private and gated repositories.
pub(crate) const TOKEN: &str = "hf_testtesttesttesttesttesttesttesttest";
/// Bytes of a piece of a response.
const PIECE: usize = 16 << 10;

/// What goes wrong, in the order of requests.
#[derive(Default)]
pub(crate) struct Faults {
    /// Each response of content ends after this many bytes, until none is left.
    pub(crate) cuts: VecDeque<usize>,
    /// Each request for content gets this status and headers, until none is left.
    pub(crate) statuses: VecDeque<(u16, Vec<(&'static str, String)>)>,
    /// Each request of the interface gets this status and headers, until none is left.
    pub(crate) interface_statuses: VecDeque<(u16, Vec<(&'static str, String)>)>,
    /// Ranges are ignored.
    pub(crate) no_ranges: bool,
    /// A byte of each response is changed.
    pub(crate) corrupt: bool,
    /// A pause before each piece.
    pub(crate) pause: Duration,
    /// Responses that never send their last byte, until none is left.
    pub(crate) stalls: usize,
    /// The content server redirects to itself, as often as this.
    pub(crate) loops: bool,
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// Whether the content server got it.
    pub(crate) at_content: bool,
    /// The path.
    pub(crate) path: String,
    /// The header `Range`.
    pub(crate) range: Option<String>,
    /// The header `Authorization`.
    pub(crate) authorization: Option<String>,
}

/// Who may read a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everyone.
    Public,
    /// Who has the token; others get 401 as if there were none.
    Private,
    /// Everyone sees it, and who has the token may download.
    Gated,
}

type Files = BTreeMap<String, Bytes>;

#[derive(Default)]
struct Shared {
    repos: BTreeMap<String, (Access, Files)>,
    faults: Faults,
    seen: Vec<Seen>,
    /// Addresses of the hub and its content server.
    hub: String,
    content: String,
}

/// The running servers; they end with it.
pub(crate) struct TestHub {
    shared: Arc<Mutex<Shared>>,
    _runtime: Runtime,
}

#[derive(Clone)]
struct Server {
    shared: Arc<Mutex<Shared>>,
    is_content: bool,
}

impl TestHub {
    /// Starts both servers.
    pub(crate) fn start() -> TestHub {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let shared = Arc::new(Mutex::new(Shared::default()));
        for is_content in [false, true] {
            let server = Server {
                shared: Arc::clone(&shared),
                is_content,
            };
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
            let address = format!("http://{}", listener.local_addr().unwrap());
            let mut guard = shared.lock().unwrap();
            if is_content {
                guard.content = address;
            } else {
                guard.hub = address;
            }
            let app = Router::new().fallback(respond).with_state(server);
            runtime.spawn(async move { axum::serve(listener, app).await });
        }
        TestHub {
            shared,
            _runtime: runtime,
        }
    }

    fn locked(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    /// Adds a file to a repository, which is created if needed.
    pub(crate) fn add(&self, repo: &str, path: &str, content: impl Into<Bytes>) {
        let mut shared = self.locked();
        let entry = shared.repos.entry(repo.to_owned());
        let (_, files) = entry.or_insert((Access::Public, Files::new()));
        files.insert(path.to_owned(), content.into());
    }

    /// Sets who may read a repository.
    pub(crate) fn protect(&self, repo: &str, access: Access) {
        self.locked().repos.get_mut(repo).unwrap().0 = access;
    }

    /// Changes the faults.
    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.locked().faults);
    }

    /// The hub's address.
    pub(crate) fn endpoint(&self) -> String {
        self.locked().hub.clone()
    }

    /// The address of a file at the content server, which is no hub.
    pub(crate) fn content_url(&self, repo: &str, path: &str) -> String {
        format!("{}/{repo}/{path}", self.locked().content)
    }

    /// The requests so far, which are forgotten.
    pub(crate) fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.locked().seen)
    }
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let hash = digest(&SHA256, bytes);
    hash.as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

async fn respond(State(server): State<Server>, request: Request) -> Response {
    let text = |name: &str| {
        let value = request.headers().get(name)?;
        Some(value.to_str().unwrap().to_owned())
    };
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let seen = Seen {
        at_content: server.is_content,
        path: path.clone(),
        range: text("range"),
        authorization: text("authorization"),
    };
    let has_token = seen.authorization.as_deref() == Some(&format!("Bearer {TOKEN}"));
    let mut shared = server.shared.lock().unwrap();
    let range = seen.range.clone();
    shared.seen.push(seen);
    if server.is_content {
        return content(&mut shared, &path, range.as_deref());
    }
    if let Some((status, headers)) = shared.faults.interface_statuses.pop_front() {
        return with_headers(status, headers, Body::empty());
    }
    match path.strip_prefix("api/models") {
        Some("") => similar(&shared, request.uri().query().unwrap_or_default()),
        Some(rest) => interface(
            &shared,
            rest.trim_start_matches('/'),
            request.uri().query(),
            has_token,
        ),
        None => resolve(&shared, &path, has_token),
    }
}

fn with_headers(status: u16, headers: Vec<(&'static str, String)>, body: Body) -> Response {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(name, value.parse().unwrap());
    }
    (StatusCode::from_u16(status).unwrap(), map, body).into_response()
}

fn refused(status: u16, code: &str) -> Response {
    with_headers(
        status,
        vec![("x-error-code", code.to_owned())],
        Body::empty(),
    )
}

fn as_json(value: &Value) -> Response {
    Body::from(value.to_string()).into_response()
}

/// `/api/models?search=…`.
fn similar(shared: &Shared, query: &str) -> Response {
    let wanted = query
        .split('&')
        .find_map(|part| part.strip_prefix("search="));
    let wanted = wanted.unwrap_or_default().to_lowercase();
    let found = shared
        .repos
        .keys()
        .filter(|repo| repo.to_lowercase().contains(&wanted));
    let found: Vec<Value> = found.map(|repo| json!({ "id": repo })).collect();
    as_json(&json!(found))
}

/// `/api/models/OWNER/REPO/…`. Lists of files have two entries a page.
fn interface(shared: &Shared, path: &str, query: Option<&str>, has_token: bool) -> Response {
    let mut parts = path.splitn(3, '/');
    let repo = format!(
        "{}/{}",
        parts.next().unwrap(),
        parts.next().unwrap_or_default()
    );
    let rest = parts.next().unwrap_or_default();
    let Some((access, files)) = shared.repos.get(&repo) else {
        return refused(if has_token { 404 } else { 401 }, "RepoNotFound");
    };
    if *access == Access::Private && !has_token {
        return refused(401, "RepoNotFound");
    }
    if let Some(revision) = rest.strip_prefix("revision/") {
        return match revision {
            "main" | "v1" | COMMIT => as_json(&json!({ "id": repo, "sha": COMMIT })),
            _ => refused(404, "RevisionNotFound"),
        };
    }
    if rest == "refs" {
        let named = |name: &str| json!({ "name": name, "targetCommit": COMMIT });
        return as_json(&json!({ "branches": [named("main")], "tags": [named("v1")] }));
    }
    assert_eq!(rest, format!("tree/{COMMIT}"));
    let page: usize = query
        .and_then(|query| query.split('&').find_map(|part| part.strip_prefix("page=")))
        .map_or(0, |page| page.parse().unwrap());
    let entries = files.iter().skip(page * 2).take(2).map(|(path, content)| {
        let hash = sha256(content);
        json!({ "type": "file", "path": path, "size": content.len(), "oid": &hash[..40],
                "lfs": { "oid": hash, "size": content.len(), "pointerSize": 130 } })
    });
    let entries: Vec<Value> = entries.collect();
    let mut response = as_json(&json!(entries));
    if files.len() > page * 2 + 2 {
        let next = format!(
            "<{}/api/models/{repo}/tree/{COMMIT}?recursive=true&page={}>; rel=\"next\"",
            shared.hub,
            page + 1
        );
        response.headers_mut().insert("link", next.parse().unwrap());
    }
    response
}

/// `/OWNER/REPO/resolve/REVISION/PATH`, which redirects to the content.
fn resolve(shared: &Shared, path: &str, has_token: bool) -> Response {
    let parts: Vec<&str> = path.splitn(5, '/').collect();
    let [owner, name, "resolve", _revision, file] = parts[..] else {
        return refused(404, "");
    };
    let repo = format!("{owner}/{name}");
    let Some((access, files)) = shared.repos.get(&repo) else {
        return refused(401, "RepoNotFound");
    };
    if *access != Access::Public && !has_token {
        return refused(
            401,
            if *access == Access::Gated {
                "GatedRepo"
            } else {
                "RepoNotFound"
            },
        );
    }
    let Some(content) = files.get(file) else {
        return refused(404, "EntryNotFound");
    };
    let headers = vec![
        (
            "location",
            format!("{}/{repo}/{file}?signature=secret", shared.content),
        ),
        ("x-repo-commit", COMMIT.to_owned()),
        ("x-linked-etag", format!("\"{}\"", sha256(content))),
        ("x-linked-size", content.len().to_string()),
    ];
    with_headers(302, headers, Body::empty())
}

/// The bytes of a file, with the faults.
fn content(shared: &mut Shared, path: &str, range: Option<&str>) -> Response {
    let faults = &mut shared.faults;
    if let Some((status, headers)) = faults.statuses.pop_front() {
        return with_headers(status, headers, Body::empty());
    }
    if faults.loops {
        let headers = vec![("location", format!("/{path}"))];
        return with_headers(302, headers, Body::empty());
    }
    let mut parts = path.splitn(3, '/');
    let repo = format!(
        "{}/{}",
        parts.next().unwrap(),
        parts.next().unwrap_or_default()
    );
    let file = parts.next().unwrap_or_default();
    let Some(whole) = shared
        .repos
        .get(&repo)
        .and_then(|(_, files)| files.get(file))
    else {
        return refused(404, "");
    };
    let mut headers = vec![("etag", format!("\"{}\"", &sha256(whole)[..8]))];
    let (status, mut bytes) = match range.filter(|_| !faults.no_ranges) {
        Some(range) => {
            let (start, end) = range
                .strip_prefix("bytes=")
                .unwrap()
                .split_once('-')
                .unwrap();
            let start: usize = start.parse().unwrap();
            let end = end.parse::<usize>().unwrap().min(whole.len() - 1);
            headers.push((
                "content-range",
                format!("bytes {start}-{end}/{}", whole.len()),
            ));
            (206, whole.slice(start..=end))
        }
        None => (200, whole.clone()),
    };
    if faults.corrupt {
        let mut changed = bytes.to_vec();
        if let Some(byte) = changed.last_mut() {
            *byte ^= 1;
        }
        bytes = changed.into();
    }
    headers.push(("content-length", bytes.len().to_string()));
    let cut = faults.cuts.pop_front().filter(|&cut| cut < bytes.len());
    let stalls = faults.stalls > 0;
    faults.stalls = faults.stalls.saturating_sub(1);
    let pause = faults.pause;
    let sent = bytes.slice(..cut.unwrap_or(bytes.len() - usize::from(stalls)));
    let pieces: Vec<Bytes> = (0..sent.len())
        .step_by(PIECE)
        .map(|at| sent.slice(at..(at + PIECE).min(sent.len())))
        .collect();
    let pieces = futures::stream::iter(pieces).then(move |piece| async move {
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Ok::<Bytes, io::Error>(piece)
    });
    let end = futures::stream::once(async move {
        if stalls {
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
        if cut.is_some() {
            // What was sent before leaves the buffers first.
            tokio::time::sleep(Duration::from_millis(1)).await;
            return Err(io::Error::other("cut"));
        }
        Ok(Bytes::new())
    });
    with_headers(status, headers, Body::from_stream(pieces.chain(end)))
}
