# A GPU image: docker build -t dino_sparo . && docker run --gpus all --ipc host -v "$PWD":/data dino_sparo demo
FROM pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime

COPY . /src
RUN pip install --no-cache-dir '/src[plots,clip,export,analyse]' && rm -rf /src

WORKDIR /data
ENTRYPOINT ["dino-sparo"]
CMD ["--help"]
