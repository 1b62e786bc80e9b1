//! A server of several models, each with a scripted device.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use contract::{Limits, LoadProgress};
use decode::PrefixConfig;
use serde_json::{Value, json};
use server::error::ServeError;
use server::http::shutdown::{ShutdownSignal, ShutdownTrigger};
use server::models::{self, HostPolicy, HostedModel, ModelHost};
use server::settings::ServerConfig;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::client::{self, HttpResponse, MAX_WAIT};
use crate::script::{ScriptRunner, Watch};
use crate::test_server::{chat_body, loaded, says, until_true, vocab};

/// One model of a test: it replies `text`.
#[derive(Clone)]
pub(crate) struct TestModel {
    pub(crate) name: &'static str,
    pub(crate) text: String,
    pub(crate) step: Duration,
    pub(crate) load_time: Duration,
    /// Whether it fits only beside no other model.
    pub(crate) is_large: bool,
    /// Whether its loads fail.
    pub(crate) fails: Arc<AtomicBool>,
    /// Number of loads that began.
    pub(crate) loads: Arc<AtomicUsize>,
    /// A watch of each runner that was opened.
    pub(crate) watches: Arc<Mutex<Vec<Watch>>>,
}

impl TestModel {
    pub(crate) fn new(name: &'static str, text: &str) -> TestModel {
        TestModel {
            name,
            text: text.to_owned(),
            step: Duration::ZERO,
            load_time: Duration::ZERO,
            is_large: false,
            fails: Arc::default(),
            loads: Arc::default(),
            watches: Arc::default(),
        }
    }

    pub(crate) fn loads(&self) -> usize {
        self.loads.load(Ordering::SeqCst)
    }

    pub(crate) fn latest(&self) -> Watch {
        self.watches.lock().unwrap().last().unwrap().clone()
    }

    pub(crate) fn hosted(&self) -> HostedModel {
        let model = self.clone();
        let fits = !self.is_large;
        HostedModel {
            name: self.name.to_owned(),
            open: Box::new(move || {
                let model = model.clone();
                Box::new(move |progress: &mut dyn FnMut(LoadProgress)| {
                    model.loads.fetch_add(1, Ordering::SeqCst);
                    progress(LoadProgress {
                        done_bytes: 5,
                        total_bytes: 10,
                    });
                    std::thread::sleep(model.load_time);
                    if model.fails.load(Ordering::SeqCst) {
                        return Err("the file is broken".into());
                    }
                    let limits = Limits {
                        sequences: 4,
                        context: 4096,
                        tree_nodes: 8,
                        prefill_chunk: 64,
                        pool_tokens: None,
                    };
                    let n_tokens = vocab().tokens.len();
                    let script = says(&model.text);
                    let (runner, watch) = ScriptRunner::new(n_tokens, limits, model.step, script);
                    model.watches.lock().unwrap().push(watch);
                    loaded(runner, limits.sequences, PrefixConfig::default())
                })
            }),
            fits: Arc::new(move || fits),
        }
    }
}

pub(crate) struct ModelsServer {
    pub(crate) address: SocketAddr,
    pub(crate) host: ModelHost,
    pub(crate) stop: ShutdownTrigger,
    pub(crate) served: JoinHandle<Result<(), ServeError>>,
}

impl ModelsServer {
    pub(crate) async fn open(
        models: &[&TestModel],
        max_loaded: usize,
        change: impl FnOnce(&mut ServerConfig, &mut HostPolicy),
    ) -> ModelsServer {
        let mut config = ServerConfig {
            model_name: models[0].name.to_owned(),
            ..ServerConfig::default()
        };
        let mut policy = HostPolicy {
            max_loaded,
            idle: None,
            queue_limit: 64,
        };
        change(&mut config, &mut policy);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (trigger, stop) = ShutdownSignal::new();
        let hosted = models.iter().map(|model| model.hosted()).collect();
        let host = models::open(hosted, policy);
        let served = server::serve_models(config, host.clone(), listener, stop);
        ModelsServer {
            address,
            host,
            stop: trigger,
            served: tokio::spawn(served),
        }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> HttpResponse {
        post(self.address, path, body).await
    }

    pub(crate) async fn chat(&self, fields: Value) -> HttpResponse {
        self.post("/v1/chat/completions", &chat_body(fields)).await
    }

    /// The reply of a model, or the status of an error.
    pub(crate) async fn reply(&self, model: &str) -> Result<String, u16> {
        reply(self.address, model).await
    }

    pub(crate) async fn list(&self) -> Value {
        let path = "/v1/models";
        client::send(self.address, "GET", path, &[], b"")
            .await
            .json()
            .await
    }

    pub(crate) async fn state(&self, model: usize) -> String {
        let list = self.list().await;
        let value = &list["data"][model]["status"]["value"];
        value
            .as_str()
            .unwrap_or_else(|| panic!("{list}"))
            .to_owned()
    }

    pub(crate) async fn until_state(&self, model: usize, state: &str) {
        until_true(state, async || self.state(model).await == state).await;
    }

    pub(crate) async fn end(self) -> Result<(), ServeError> {
        self.stop.trigger();
        self.ended().await
    }

    /// The end of a server that was stopped before: a second stop would force it.
    pub(crate) async fn ended(self) -> Result<(), ServeError> {
        tokio::time::timeout(MAX_WAIT, self.served)
            .await
            .expect("the server ends in time")
            .unwrap()
    }
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> HttpResponse {
    let headers = [("content-type", "application/json")];
    client::send(address, "POST", path, &headers, body.to_string().as_bytes()).await
}

pub(crate) async fn reply(address: SocketAddr, model: &str) -> Result<String, u16> {
    let body = chat_body(json!({"model": model}));
    let response = post(address, "/v1/chat/completions", &body).await;
    if response.status != 200 {
        return Err(response.status);
    }
    let reply = response.json().await;
    assert_eq!(reply["model"], model);
    let text = reply["choices"][0]["message"]["content"].as_str();
    Ok(text.unwrap().to_owned())
}
