#!/bin/bash
# What a container is: spark-node master | worker MASTER_URL | driver COMMAND...
# As root it reads the secret, writes it where only the user paceline can read it, and goes on as that user. With
# SPARK_NODE_USER=own it goes on as the user that the container was started as (paceline cluster up --containers).
set -euo pipefail

secret_file=/run/secrets/spark_secret
conf=/run/spark/conf
host=$(hostname)
cores=${SPARK_WORKER_CORES:-2}
memory=${SPARK_WORKER_MEMORY:-1g}

if [ ! -s "$secret_file" ]; then
    echo "spark-node: no secret in $secret_file: openssl rand -hex 32 > deploy/spark_secret" >&2
    exit 2
fi
umask 077
mkdir -p "$conf"
cat > "$conf/spark-defaults.conf" << CONF
spark.authenticate true
spark.authenticate.secret $(tr -d '[:space:]' < "$secret_file")
spark.network.crypto.enabled true
spark.network.crypto.saslFallback false
spark.master.rest.enabled false
spark.master.ui.decommission.allow.mode DENY
spark.ui.killEnabled false
spark.ui.enabled false
spark.driver.host $host
spark.executor.cores $cores
spark.executor.memory $memory
spark.executorEnv.OMP_NUM_THREADS 1
CONF
umask 022

SPARK_HOME=$(python -c "from paceline.spark.java import spark_home; print(spark_home())")
export SPARK_HOME SPARK_CONF_DIR=$conf
PYSPARK_PYTHON=$(command -v python)
export PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON=$PYSPARK_PYTHON
if [ "${SPARK_NODE_USER:-paceline}" = own ]; then
    export HOME=/tmp/home
    mkdir -p "$HOME"
    as_user=()
else
    export HOME=/home/paceline
    chown -R paceline:paceline /run/spark
    as_user=(setpriv --reuid=paceline --regid=paceline --init-groups --no-new-privs)
fi

case ${1:-} in
    master)
        exec "${as_user[@]}" "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.master.Master \
            --host "$host" --port 7077 --webui-port 8080
        ;;
    worker)
        address=${2:?which master?}
        address=${address#spark://}
        # A worker that finds no master tries again only after 5 to 15 s.
        until (exec 3<> "/dev/tcp/${address%:*}/${address#*:}") 2> /dev/null; do sleep 0.5; done
        exec "${as_user[@]}" "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.worker.Worker \
            --host "$host" --webui-port 8081 --cores "$cores" --memory "$memory" --work-dir /tmp/spark-work \
            "$2"
        ;;
    driver)
        shift
        export PACELINE_SPARK_MASTER=spark://master:7077
        if [ -n "${SPARK_NODE_HELD:-}" ]; then # whoever started this holds its standard input open, and is gone when it closes
            exec 3<&0
            (cat <&3 > /dev/null; kill -TERM $$) &
            exec 3<&- < /dev/null
        fi
        exec "${as_user[@]}" "$@"
        ;;
    *)
        echo "spark-node: ${1:-nothing} is none of master, worker, driver" >&2
        exit 2
        ;;
esac
